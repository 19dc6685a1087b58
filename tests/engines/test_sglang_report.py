"""What SGLang may change on a GPU of what it was asked for, and what not: reports of two versions, laid out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from eagle3x.config import Hardware
from eagle3x.engines.config import Attention, Backend, Quantization, Slot
from eagle3x.engines.sglang_arguments import arguments
from eagle3x.engines.sglang_report import LOSSLESS, Asked, compared, read
from eagle3x.targets import Target
from eagle3x.types import EagleError

CUDA = Hardware(device="cuda", threads=None, devices=None)
BACKEND = Backend(
    name="sglang", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=64, engine_args={},
    python=None, url=None, port=None, memory_fraction=0.85, start_timeout=600.0,
)  # fmt: skip
LONGEST = 504
FA3 = {"prefill_attention_backend": "fa3", "decode_attention_backend": "fa3"}
NO_PHASES: dict[str, Any] = dict.fromkeys(FA3)
RESOLVED: dict[str, dict[str, Any]] = {
    # server_args.py: what `__post_init__` fills in for a Llama on compute capability 9
    "0.5.14": {"page_size": 1, "sampling_backend": "flashinfer", "disable_cuda_graph": False, **NO_PHASES},
    # arg_groups/overrides.py, the same; and a report in which both phases have a backend of their own
    "0.5.23": {"page_size": 1, "sampling_backend": "flashinfer", "disable_cuda_graph": False, **FA3},
}
Changes = Mapping[str, Any]


def asked(target: Target, version: str, engine_args: Changes | None = None, **changes: Any) -> Asked:
    backend = replace(BACKEND, engine_args=dict(engine_args or {}), **changes)
    slot = Slot("serve", backend, Quantization(scheme="none"), Attention(name="auto"))
    return Asked(version, "fa3", None, arguments(slot, target, CUDA, "fa3", LONGEST))


def report(version: str, given: Asked, changes: Changes, scheduler: Changes) -> dict[str, Any]:
    """/server_info of a server that was given these arguments, as it resolves them, with `changes`."""
    unset = {f"speculative_{name}": None for name in ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")}
    own = {"served_model_name": "tiny", "quantization": None, "enable_metrics": True, **unset}
    told = {**own, **RESOLVED[version], **given.arguments, **changes}
    state = {
        "kv_cache_dtype": told["kv_cache_dtype"],
        "effective_max_running_requests_per_dp": told["max_running_requests"],
        **scheduler,
    }
    return {"version": version, "max_total_num_tokens": told["max_total_tokens"], "internal_states": [state], **told}


def differing(given: Asked, info: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: pair for name, pair in compared(given, info).items() if pair[0] != pair[1]}


@pytest.fixture(params=list(RESOLVED))
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    ("engine_args", "changes", "scheduler"),
    [
        ({}, {}, {}),
        ({}, {"mem_fraction_static": 0.807}, {}),  # images need more of the memory
        ({"page_size": 1}, {"page_size": 64}, {}),  # the page of FlashMLA and TensorRT-LLM
        ({}, {"chunked_prefill_size": -1}, {}),
        ({"disable_cuda_graph": False}, {"disable_cuda_graph": True}, {}),
        ({}, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "bfloat16"}),  # DeepSeek's sparse attention
        ({}, {"attention_backend": "triton", **FA3}, {}),
        ({}, {"prefill_attention_backend": None, "decode_attention_backend": "fa3"}, {}),
        ({}, {"sampling_backend": "pytorch", "disable_overlap_schedule": True, "served_model_name": "other"}, {}),
    ],
)
def test_what_means_the_same(
    version: str, tiny_target: Target, engine_args: Changes, changes: Changes, scheduler: Changes
) -> None:
    given = asked(tiny_target, version, engine_args)
    assert differing(given, report(version, given, changes, scheduler)) == {}


@pytest.mark.parametrize(
    ("engine_args", "changes", "scheduler", "name", "pair"),
    [
        ({}, {"chunked_prefill_size": 2048}, {}, "chunked_prefill_size", (8192, 2048)),
        ({}, {"max_prefill_tokens": 16384}, {}, "max_prefill_tokens", (8192, 16384)),
        ({"disable_cuda_graph": True}, {"disable_cuda_graph": False}, {}, "disable_cuda_graph", (True, False)),
        ({"enable_mixed_chunk": True}, {"enable_mixed_chunk": False}, {}, "enable_mixed_chunk", (True, False)),
        ({}, {"dtype": "float16"}, {}, "dtype", ("bfloat16", "float16")),
        ({}, {"disable_radix_cache": False}, {}, "disable_radix_cache", (True, False)),
        ({}, {"tp_size": 2}, {}, "tp_size", (1, 2)),
        ({}, {"quantization": "fp8"}, {}, "quantization", (None, "fp8")),
        ({}, {}, {"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype", ("auto", "fp8_e4m3")),  # the checkpoint's
        ({}, {}, {"effective_max_running_requests_per_dp": 40}, "max_running_requests", (64, 40)),
        ({}, {"attention_backend": "triton"}, {}, "attention", (["fa3"], ["triton"])),
        ({}, {"decode_attention_backend": "trtllm_mha"}, {}, "attention", (["fa3"], ["fa3", "trtllm_mha"])),
        ({"no_such": 1}, {"no_such": None}, {}, "no_such", (1, None)),
    ],
)
def test_what_means_something_else(
    version: str,
    tiny_target: Target,
    engine_args: Changes,
    changes: Changes,
    scheduler: Changes,
    name: str,
    pair: tuple[Any, Any],
) -> None:
    given = asked(tiny_target, version, engine_args)
    assert differing(given, report(version, given, {**NO_PHASES, **changes}, scheduler)) == {name: pair}


def test_another_version_and_a_smaller_cache(version: str, tiny_target: Target) -> None:
    given = asked(tiny_target, version)
    info = {**report(version, given, {}, {}), "version": "0.5.20", "max_total_num_tokens": 4096}
    found = differing(given, info)
    assert found.pop("version") == (version, "0.5.20")
    assert list(found.values()) == [(64 * 768, 4096)]  # 504, what SGLang keeps, and the drafts', in pages of 128


@pytest.mark.parametrize(("reported", "same"), [(None, True), ("compressed-tensors", True), ("fp8", False)])
def test_a_quantized_checkpoint(version: str, tiny_target: Target, reported: str | None, same: bool) -> None:
    """Most classes read it from the checkpoint without reporting it."""
    given = replace(asked(tiny_target, version), quantization="compressed-tensors")
    assert (differing(given, report(version, given, {"quantization": reported}, {})) == {}) == same


def test_weights_quantized_while_loading_are_reported(version: str, tiny_target: Target) -> None:
    plain = asked(tiny_target, version)
    given = replace(plain, quantization="fp8", arguments={**plain.arguments, "quantization": "fp8"})
    assert differing(given, report(version, given, {}, {})) == {}
    assert differing(given, report(version, given, {"quantization": None}, {})) == {"quantization": ("fp8", None)}


def test_a_cache_of_bfloat16_has_two_names(version: str, tiny_target: Target) -> None:
    given = asked(tiny_target, version, kv_cache_dtype="bf16")
    assert differing(given, report(version, given, {}, {"kv_cache_dtype": "bfloat16"})) == {}
    assert "kv_cache_dtype" in differing(given, report(version, given, {}, {"kv_cache_dtype": "auto"}))


def test_a_report_that_lacks_something_is_an_error(version: str, tiny_target: Target) -> None:
    info = report(version, asked(tiny_target, version), {}, {})
    with pytest.raises(EagleError, match="/server_info lacks 'tp_size'"):
        read({name: value for name, value in info.items() if name != "tp_size"})


def test_other_rules_of_acceptance_are_seen(version: str, tiny_target: Target) -> None:
    given = asked(tiny_target, version)
    assert read(report(version, given, {}, {})).lossless  # a version that has no such arguments
    assert read(report(version, given, LOSSLESS, {})).lossless
    for name, value in (
        ("speculative_accept_threshold_single", 0.9),
        ("speculative_accept_threshold_acc", 0.5),
        ("speculative_use_rejection_sampling", True),
    ):
        assert not read(report(version, given, {**LOSSLESS, name: value}, {})).lossless
