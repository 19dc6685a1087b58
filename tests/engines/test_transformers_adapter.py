"""What the transformers adapter says before anything is loaded."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from eagle3x.config import Hardware
from eagle3x.engines import adapter
from eagle3x.engines import transformers as engine_module
from eagle3x.engines.config import Attention, Backend, Quantization, Slot
from eagle3x.targets import Target

CPU = Hardware(device="cpu", threads=None, devices=None)
CUDA = Hardware(device="cuda", threads=None, devices=None)


def slot(attention: str = "auto", quantization: str = "none", **changes: Any) -> Slot:
    values: dict[str, Any] = {
        "name": "transformers", "runner": "auto",
        "dtype": "auto", "kv_cache_dtype": "auto", "tensor_parallel": 1, "batch_size": 8,
        "engine_args": {}, "python": None, "url": None, "port": None, "memory_fraction": 0.85, "start_timeout": 60.0,
    }  # fmt: skip
    return Slot("serve", Backend(**(values | changes)), Quantization(quantization), Attention(attention))  # type: ignore[arg-type]


def test_identity_as_resolved(tiny_target: Target) -> None:
    identity = adapter("transformers").identity(slot(), tiny_target, CPU)
    assert identity == {
        "engine": "transformers", "version": version("transformers"), "torch": version("torch"),
        "runner": "in_process", "attention": "sdpa", "quantization": "none", "dtype": "float32",
        "kv_cache_dtype": "float32", "device": "cpu", "sm": None, "tensor_parallel": 1, "batch_size": 8,
        "batch_invariant": False, "chunked_prefill": False, "prefix_cache": False,
    }  # fmt: skip


def test_auto_and_its_resolution_share_an_identity(tiny_target: Target) -> None:
    a = adapter("transformers")
    assert a.identity(slot("sdpa"), tiny_target, CPU) == a.identity(slot("auto"), tiny_target, CPU)
    assert a.identity(slot("eager"), tiny_target, CPU)["attention"] == "eager"


def test_cuda_is_bfloat16_and_names_its_compute_capability(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "compute_capability", lambda _: "9.0")
    identity = adapter("transformers").identity(slot(), tiny_target, CUDA)
    assert (identity["dtype"], identity["kv_cache_dtype"], identity["sm"]) == ("bfloat16", "bfloat16", "9.0")
    assert adapter("transformers").refusals(slot(), tiny_target, CUDA) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (slot(quantization="nvfp4"), ("quantization=nvfp4", "use quantization=int4")),
        (slot("flashinfer"), ("attention=flashinfer", "sdpa and eager")),
        (slot(kv_cache_dtype="fp8"), ("kv_cache_dtype=fp8", "use auto")),
        (slot(tensor_parallel=2), ("tensor_parallel=2", "use 1")),
        (slot(engine_args={"max_num_seqs": 4}), ("engine_args", "max_num_seqs")),
        (slot(url="http://127.0.0.1:1"), ("backend.url=http://127.0.0.1:1", "use null")),
        (slot(python="/bin/python"), ("backend.python=/bin/python", "use null")),
        (slot(port=80), ("backend.port=80", "use null")),
        (slot(runner="v2"), ("backend.runner=v2", "use auto")),
    ],
)
def test_refusals_say_what_would_be_right(tiny_target: Target, changed: Slot, words: tuple[str, ...]) -> None:
    (reason,) = adapter("transformers").refusals(changed, tiny_target, CPU)
    assert all(word in reason for word in words)


def test_every_reason_is_given_at_once(tiny_target: Target) -> None:
    assert len(adapter("transformers").refusals(slot("fa3", "nvfp4", tensor_parallel=2), tiny_target, CPU)) == 3


def test_nothing_to_refuse(tiny_target: Target) -> None:
    for name in ("auto", "sdpa", "eager"):
        assert adapter("transformers").refusals(slot(name), tiny_target, CPU) == []


def test_no_gpu(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "compute_capability", lambda _: None)
    (reason,) = adapter("transformers").refusals(slot(), tiny_target, CUDA)
    assert "no GPU" in reason
    assert "hardware=cpu" in reason


def test_several_devices(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "compute_capability", lambda _: "9.0")
    (reason,) = adapter("transformers").refusals(slot(), tiny_target, dataclasses.replace(CUDA, devices=(0, 1)))
    assert "one device" in reason


def test_remote_code(tiny_target: Target) -> None:
    (reason,) = adapter("transformers").refusals(slot(), dataclasses.replace(tiny_target, trust_remote_code=True), CPU)
    assert "trust_remote_code=false" in reason


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ('{"layer_types": ["full_attention", "sliding_attention"]}', True),
        ('{"layer_types": ["full_attention"], "sliding_window": 128}', False),
        ('{"sliding_window": 4096}', True),
        ('{"sliding_window": 4096, "use_sliding_window": false}', False),
        ('{"sliding_window": null}', False),
    ],
)
def test_sliding_windows(tiny_target: Target, tmp_path: Path, config: str, refused: bool) -> None:
    (tmp_path / "config.json").write_text(config)
    reasons = adapter("transformers").refusals(slot(), dataclasses.replace(tiny_target, path=tmp_path), CPU)
    assert len(reasons) == refused
    assert all("sliding_attention" in r for r in reasons)


def test_nothing_is_imported(tiny_target: Target) -> None:
    program = (
        "import sys, pathlib; from types import SimpleNamespace as N; from eagle3x.engines import adapter;"
        "slot = N(role='serve', backend=N(runner='auto', dtype='auto', kv_cache_dtype='auto', tensor_parallel=1,"
        " batch_size=1,"
        " engine_args={}, url=None, python=None, port=None), quantization=N(scheme='none'), attention=N(name='auto'));"
        f"target = N(path=pathlib.Path({str(tiny_target.path)!r}), name='x', trust_remote_code=False);"
        "hardware = N(device='cpu', devices=None);"
        "a = adapter('transformers'); assert a.refusals(slot, target, hardware) == [];"
        "assert a.identity(slot, target, hardware)['dtype'] == 'float32';"
        "sys.exit(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
