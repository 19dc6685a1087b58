"""What is known of SGLang before it is loaded: its identity, and why it refuses what it would not honour."""

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
from eagle3x.engines.sglang import SglangAdapter
from eagle3x.engines.sglang_arguments import MARGIN, arguments, environment, resolved_attention
from eagle3x.targets import Target
from eagle3x.types import ConfigError

CPU = Hardware(device="cpu", threads=None, devices=None)
CUDA = Hardware(device="cuda", threads=None, devices=None)
BACKEND = Backend(
    name="sglang", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=64, engine_args={},
    python=None, url=None, port=None, memory_fraction=0.85, start_timeout=600.0,
)  # fmt: skip
PLAN = DrafterPlan(3, (1, 2, 4), frozenset(), Speculation.chain(3), sampled=False)


def slot(role: str = "extract", attention: str = "auto", quantization: str = "none", **changes: Any) -> Slot:
    scheme: Any = quantization
    return Slot(role, replace(BACKEND, **changes), Quantization(scheme=scheme), Attention(name=attention))  # type: ignore[arg-type]


def found(monkeypatch: pytest.MonkeyPatch, version: str, capability: str | None = "9.0") -> None:
    """A machine with this SGLang, as the adapter sees it: what the driver and the environment answer."""
    answer = EngineInterpreter(Path("/opt/sglang/bin/python"), version, {"sglang": version, "torch": "2.11.0"})
    monkeypatch.setattr(interpreter, "find", lambda *_: answer)
    monkeypatch.setattr(gpus, "compute_capability", lambda _: capability)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "0.5.14")


def changed(target: Target, folder: Path, **keys: Any) -> Target:
    """A copy of the target whose config.json says something else."""
    shutil.copytree(target.path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return replace(target, path=folder)


def test_identity_on_a_cpu_names_what_runs(tiny_target: Target) -> None:
    identity = adapter("sglang").identity(slot(), tiny_target, CPU)
    assert (identity["engine"], identity["version"]) == ("sglang", "0.5.23")
    assert (identity["attention"], identity["dtype"], identity["runner"]) == ("intel_amx", "float32", None)


def test_a_setting_that_changes_floats_changes_the_identity(tiny_target: Target) -> None:
    base = SglangAdapter().identity(slot(), tiny_target, CPU)
    for other in (
        slot(dtype="bfloat16"),
        slot(batch_size=8),
        slot(attention="torch_native"),
        slot(kv_cache_dtype="fp8_e4m3"),
        slot(tensor_parallel=2),
        slot(engine_args={"chunked_prefill_size": 512}),
    ):
        assert SglangAdapter().identity(other, tiny_target, CPU) != base


def test_placement_does_not_change_the_identity(tiny_target: Target) -> None:
    base = SglangAdapter().identity(slot("serve"), tiny_target, CPU)
    for other in (slot("serve", port=8123), slot("serve", memory_fraction=0.5), slot("serve", start_timeout=1.0)):
        assert SglangAdapter().identity(other, tiny_target, CPU) == base


def test_what_runs_on_a_cpu_is_not_refused(tiny_target: Target) -> None:
    for role in ("extract", "generate", "serve"):
        assert SglangAdapter().refusals(slot(role), tiny_target, CPU) == []
    assert SglangAdapter().drafter_refusals(slot("serve"), tiny_target, CPU, PLAN) == []


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (slot(attention="triton"), "SGLang has intel_amx, torch_native on a CPU, or auto"),
        (slot(attention="sdpa"), "SGLang has intel_amx, torch_native on a CPU, or auto"),
        (slot(quantization="fp8"), "ever run on SGLang on a CPU; use quantization=none"),
        (slot(quantization="int8"), "ever run on SGLang on a CPU; use quantization=none"),
        (slot(tensor_parallel=4096), "each rank needs a core"),
        (slot(kv_cache_dtype="fp8_e4m3"), "use auto"),
        (slot(runner="v2"), "no choice of runners"),
        (slot(engine_args={"context-length": 5, "max_total_tokens": 9}), "context_length, max_total_tokens are"),
        (slot(engine_args={"disable_radix_cache": False}), "disable_radix_cache are decided by other"),
        (slot("serve", engine_args={"speculative_algorithm": "EAGLE"}), "speculative_algorithm are decided by other"),
        (slot("serve", engine_args={"speculative-eagle-topk": 4}), "speculative_eagle_topk are decided by other"),
        (slot(engine_args={"dp_size": 2}), "dp_size: never run here; use backend.tensor_parallel"),
        (slot(engine_args={"disable_cuda_graph": False}), "a replayed graph runs no hook"),
        (slot(url="http://localhost:1"), "belongs to the serve slot"),
        (slot("generate", port=8000), "belongs to the serve slot"),
        (slot("serve", port=55536), "SGLang needs one up to 55535"),
        (slot(python="/nowhere/python"), "there is no such file; `make env-sglang-cpu`"),
    ],
)
def test_what_would_not_be_honoured_is_refused(tiny_target: Target, refused: Slot, reason: str) -> None:
    reasons = SglangAdapter().refusals(refused, tiny_target, CPU)
    assert len(reasons) == 1, reasons
    assert reason in reasons[0]


def test_a_stop_token_that_sglang_would_add_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """It stops at the stop tokens of config.json and generation_config.json; generation_config.json names 2 alone."""
    assert tiny_target.eos_token_ids == (2,)
    target = changed(tiny_target, tmp_path / "more", eos_token_id=[2, 7])
    for role in ("generate", "serve"):
        (reason,) = SglangAdapter().refusals(slot(role), target, CPU)
        assert "config.json names stop tokens [7]" in reason
    assert SglangAdapter().refusals(slot("extract"), target, CPU) == []


@pytest.mark.parametrize(
    ("plan", "serving", "reason"),
    [
        (replace(PLAN, variants=frozenset({"norm_before_residual"})), slot("serve"), "serve this drafter with backend"),
        (replace(PLAN, boundaries=(0, 2, 4)), slot("serve"), "boundary 0 (the embedding) was never measured"),
        (replace(PLAN, boundaries=(1, 2, 6)), slot("serve"), "cannot capture the last block's output (boundary 6)"),
        (replace(PLAN, sampled=True), slot("serve"), "benchmark.temperatures: SGLang verifies greedily on a CPU"),
        (replace(PLAN, num_aux=2), slot("serve"), "fc reads 2 boundaries, SGLang would feed it 3"),
        (PLAN, slot("serve", attention="torch_native"), "no draft attention of that name; use attention=auto"),
    ],
)
def test_drafters_that_would_be_served_wrong(
    tiny_target: Target, plan: DrafterPlan, serving: Slot, reason: str
) -> None:
    (refused,) = SglangAdapter().drafter_refusals(serving, tiny_target, CPU, plan)
    assert reason in refused


def test_norm_variants_need_a_version_that_reads_them(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.14's draft model has no norm over the concatenated boundaries (models/llama_eagle3.py)."""
    plan = replace(PLAN, variants=frozenset({"norm_before_fc", "norm_output"}))
    assert SglangAdapter().drafter_refusals(slot("serve"), tiny_target, CPU, plan) == []
    found(monkeypatch, "0.5.14")
    (refused,) = SglangAdapter().drafter_refusals(slot("serve"), tiny_target, CUDA, plan)
    assert "drafter.norm_before_fc: SGLang 0.5.14 is older than 0.5.23" in refused


def test_old_versions_do_not_speculate_on_a_cpu(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "0.5.14")
    (refused,) = SglangAdapter().drafter_refusals(slot("serve"), tiny_target, CPU, PLAN)
    assert refused == "SGLang 0.5.14 does not speculate on a CPU; 0.5.23 does"


def test_a_class_whose_numbering_nobody_read_is_refused(tiny_target: Target) -> None:
    target = replace(tiny_target, model_class="NewForCausalLM")
    (refused,) = SglangAdapter().drafter_refusals(slot("serve"), target, CPU, PLAN)
    assert "how this class reads layer ids is not known" in refused


def test_a_machine_without_a_gpu_is_told_so(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("EAGLE3X_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(interpreter, "PROJECT", tmp_path)
    monkeypatch.chdir(tmp_path)
    reasons = SglangAdapter().refusals(slot(), tiny_target, CUDA)
    assert any("reports no GPU" in reason for reason in reasons)
    assert any("make env-sglang`" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("capability", "dtype", "kind", "backend"),
    [
        ("9.0", "auto", "ordinary", "fa3"),
        ("8.0", "auto", "ordinary", "flashinfer"),
        ("10.0", "auto", "ordinary", "trtllm_mha"),
        ("9.0", "float32", "ordinary", "triton"),
        ("9.0", "auto", "latent", "fa3"),
        ("10.0", "auto", "latent", "flashinfer"),
        ("8.0", "auto", "latent", "triton"),
        ("8.0", "auto", "sinks", "triton"),
    ],
)
def test_the_default_attention_on_a_gpu_is_sglangs_own(
    tiny_target: Target, tmp_path: Path, capability: str, dtype: str, kind: str, backend: str
) -> None:
    """arg_groups/model_override_base.py: get_default_attn_backend; but float32, which Triton alone computes."""
    target = changed(tiny_target, tmp_path / "latent", kv_lora_rank=16) if kind == "latent" else tiny_target
    target = replace(target, model_class="GptOssForCausalLM") if kind == "sinks" else target
    assert resolved_attention(slot(dtype=dtype), target, CUDA, capability) == backend


@pytest.mark.usefixtures("on_gpu")
def test_attention_on_a_gpu_is_what_is_asked_for_or_refused(tiny_target: Target, tmp_path: Path) -> None:
    for name in ("fa3", "flashinfer", "triton", "torch_native"):
        asked = slot("serve", attention=name)
        assert SglangAdapter().refusals(asked, tiny_target, CUDA) == []
        assert arguments(asked, tiny_target, CUDA, name, 64)["attention_backend"] == name
    for name in ("sdpa", "eager", "flash_attn", "intel_amx"):
        (reason,) = SglangAdapter().refusals(slot(attention=name), tiny_target, CUDA)
        assert "SGLang has fa3, flashinfer, triton, torch_native" in reason
    with pytest.raises(ConfigError, match="runs it on compute capability 8 and 9, not 10"):
        resolved_attention(slot(attention="fa3"), tiny_target, CUDA, "10.0")
    latent = changed(tiny_target, tmp_path / "latent", kv_lora_rank=16)
    (reason,) = SglangAdapter().refusals(slot(attention="torch_native"), latent, CUDA)
    assert "on a GPU for latent attention" in reason


@pytest.mark.usefixtures("on_gpu")
def test_devices_must_be_as_many_as_ranks(tiny_target: Target) -> None:
    two = replace(CUDA, devices=(0, 1))
    assert SglangAdapter().refusals(slot(tensor_parallel=2), tiny_target, two) == []
    (reason,) = SglangAdapter().refusals(slot(tensor_parallel=1), tiny_target, two)
    assert "tensor_parallel=1" in reason


def test_both_sides_have_room_for_every_sequence(tiny_target: Target) -> None:
    """64 sequences of 100 tokens, what SGLang keeps of its context for itself, and room for drafts."""
    given = arguments(slot(), tiny_target, CPU, "intel_amx", 100)
    assert given["context_length"] == 100 + MARGIN
    assert given["max_total_tokens"] == 64 * 384  # 100 + MARGIN + DRAFT_ROOM, in whole pages
    assert (given["prefill_attention_backend"], given["decode_attention_backend"]) == ("intel_amx", "intel_amx")
    assert given["attention_backend"] == "torch_native"  # SGLang falls back from intel_amx, but not from these two
    assert given["disable_radix_cache"] is True
    assert (
        arguments(slot(engine_args={"max_prefill_tokens": 9}), tiny_target, CPU, "intel_amx", 5)["max_prefill_tokens"]
        == 9
    )


def test_ranks_share_the_cores_of_a_cpu() -> None:
    four = replace(CPU, threads=4)
    assert environment(slot(), four)["OMP_NUM_THREADS"] == "4"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(slot(), four)
    two_ranks = environment(slot(tensor_parallel=2), four)
    assert (two_ranks["OMP_NUM_THREADS"], two_ranks["SGLANG_CPU_OMP_THREADS_BIND"]) == ("2", "0-1|2-3")


def test_nothing_is_fetched_and_devices_are_named() -> None:
    variables = environment(slot(), replace(CUDA, devices=(3,)))
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["CUDA_VISIBLE_DEVICES"] == "3"
    assert "OMP_NUM_THREADS" not in variables
