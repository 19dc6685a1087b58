"""What SGLang is told: a slot of the config as its arguments and environment; what it would not honour. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagle3x.engines.inside.sglang_capture.order import VARIABLE, CaptureOrder
from eagle3x.engines.resolved import config_of, is_mla, quantization_argument, resolved_dtype
from eagle3x.engines.sglang_serve import capacity
from eagle3x.types import ConfigError

if TYPE_CHECKING:
    from eagle3x.config import Hardware
    from eagle3x.engines.config import Slot
    from eagle3x.targets import Target

CPU_ATTENTION = ("intel_amx", "torch_native")
"""Names of `attention=` on a CPU, the default first: the only one with which SGLang drafts there."""
ATTENTION = ("fa3", "flashinfer", "triton", "torch_native", "trtllm_mha", "fa4")
"""Names of `attention=` on a GPU, for targets with ordinary attention."""
MLA_ATTENTION = ("fa3", "flashinfer", "triton", "flashmla", "trtllm_mla")
"""The same for multi-head latent attention (DeepSeek, Kimi)."""
NOT_DRAFTING = frozenset({"torch_native"})
"""Attention backends without one for drafting (speculative/draft_utils.py)."""
CPU_DRAFTS_SINCE = "0.5.23"
"""The first version seen that speculates on a CPU (speculative/draft_utils.py names intel_amx)."""

OURS = frozenset(
    {
        "model", "model_path", "tokenizer_path", "served_model_name", "dtype", "kv_cache_dtype", "quantization",
        "attention_backend", "prefill_attention_backend", "decode_attention_backend", "tp", "tp_size",
        "tensor_parallel_size", "device", "base_gpu_id", "trust_remote_code", "random_seed", "skip_tokenizer_init",
        "disable_radix_cache", "mem_fraction_static", "context_length", "max_running_requests", "max_total_tokens",
        "host", "port", "forward_hooks", "json_model_override_args", "preferred_sampling_params", "log_level",
        "enable_metrics", "stream_interval",
    }
)  # fmt: skip
"""Arguments that other config nodes decide, or that would change what is measured."""
SPREADING = frozenset(
    {
        "pp", "pp_size", "pipeline_parallel_size", "dp", "dp_size", "data_parallel_size", "enable_dp_attention",
        "attn_cp_size", "disaggregation_mode", "nnodes", "dist_init_addr",
    }
)  # fmt: skip
"""Arguments that put a target's tokens, or its blocks, onto ranks that know only some of them: never run here."""
SPECULATIVE = "speculative_"

BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Prompt tokens of one forward; longer prompts are cut into chunks."""
MARGIN = 8
"""Tokens of its context that SGLang gives to no prompt and answer (managers/tp_worker.py: max_req_input_len)."""


def resolved_attention(slot: Slot, target: Target, hardware: Hardware, capability: str | None) -> str:
    """The backend that SGLang is told to use; `auto` is its own first choice for this device, dtype and a chain.

    arg_groups/model_override_base.py:get_default_attn_backend (0.5.14: server_args.py:4407). On a CPU without AMX it
    would take torch_native, with which it cannot draft. Of those on a GPU only Triton computes in float32.

    Raises:
        ConfigError: a name that SGLang has not on this device.
    """
    mla, name = is_mla(target), slot.attention.name
    if hardware.device == "cpu":
        known = CPU_ATTENTION
        name = CPU_ATTENTION[0] if name == "auto" else name
    else:
        known = MLA_ATTENTION if mla else ATTENTION
        name = _gpu_default(slot, target, hardware, capability or "") if name == "auto" else name
    if name not in known:
        where = "a CPU" if hardware.device == "cpu" else "a GPU"
        kind = " for latent attention" if mla and hardware.device == "cuda" else ""
        raise ConfigError(f"attention={name}: SGLang has {', '.join(known)} on {where}{kind}, or auto")
    if name == "fa3" and (major := (capability or "").split(".")[0]) not in (("9",) if mla else ("8", "9")):
        raise ConfigError(
            f"attention=fa3: SGLang runs it on compute capability {'9' if mla else '8 and 9'}, not {major or 'none'};"
            " use attention=auto"
        )
    return name


def _gpu_default(slot: Slot, target: Target, hardware: Hardware, capability: str) -> str:
    if resolved_dtype(slot, hardware) == "float32":
        return "triton"
    mla = is_mla(target)
    match capability.split(".")[0]:
        case "9":
            return "fa3"
        case "10":
            return "flashinfer" if mla else "trtllm_mha"
        case _:
            return "triton" if mla or target.model_class == "GptOssForCausalLM" else "flashinfer"


def attention_arguments(attention: str, hardware: Hardware) -> dict[str, str]:
    """The arguments that make SGLang use `attention` for prompts and for decoding.

    intel_amx is named for both, and not as the backend itself: without AMX, SGLang would fall back from that one
    (arg_groups/overrides.py: _attention_backend_platform_fallbacks).
    """
    both = {"prefill_attention_backend": attention, "decode_attention_backend": attention}
    if hardware.device == "cpu":
        return {"attention_backend": "torch_native", **(both if attention != "torch_native" else {})}
    return {"attention_backend": attention}


def arguments(slot: Slot, target: Target, hardware: Hardware, attention: str, longest: int) -> dict[str, Any]:
    """Keyword arguments of SGLang's `ServerArgs` that generating, capturing and serving share.

    longest: tokens of the longest sequence. No radix cache: a repeated prompt must cost what a new one costs, and
    captured states must be there for every token.
    """
    backend = slot.backend
    shared: dict[str, Any] = {
        "model_path": str(target.path),
        "device": hardware.device,
        "dtype": resolved_dtype(slot, hardware),
        "kv_cache_dtype": backend.kv_cache_dtype,
        "tp_size": backend.tensor_parallel,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "trust_remote_code": target.trust_remote_code,
        "random_seed": 0,
        "mem_fraction_static": backend.memory_fraction,
        **attention_arguments(attention, hardware),
        **capacity(backend.batch_size, longest + MARGIN, BATCH_TOKENS[hardware.device]),
    }
    if (quantization := quantization_argument(slot)) is not None:
        shared["quantization"] = quantization
    if hardware.device == "cpu":
        # A scheduler without work polls on a core of its own, and a plain server waits beside the speculating one.
        shared |= {"sampling_backend": "pytorch", "disable_cuda_graph": True, "sleep_on_idle": True}
    return {**shared, **backend.engine_args}


def environment(slot: Slot, hardware: Hardware) -> dict[str, str]:
    """Environment variables of every SGLang process that we start."""
    variables = {
        "HF_HUB_OFFLINE": "1",  # the target is a directory: nothing may be fetched in its place
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by MARGIN, which no one asks for
    }
    if hardware.device == "cpu":
        ranks = slot.backend.tensor_parallel
        threads = max(1, (hardware.threads or os.cpu_count() or 1) // ranks)
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a small target's whole work
            "OMP_NUM_THREADS": str(threads),
        }
        if ranks > 1:  # else SGLang wants a NUMA node for each
            cores = [f"{rank * threads}-{(rank + 1) * threads - 1}" for rank in range(ranks)]
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    elif hardware.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in hardware.devices)
    return variables


def capture_environment(layer_ids: Sequence[int], ring: str) -> dict[str, str]:
    """What makes SGLang's models capture at these layers into the ring at this path."""
    order = CaptureOrder(tuple(layer_ids), ring)
    return {VARIABLE: order.to_json(), "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_capture"}


def reserved(engine_args: Mapping[str, Any]) -> list[str]:
    """Names in `engine_args` that are not the user's to give there."""
    names = {name.replace("-", "_") for name in engine_args}
    return sorted(name for name in names if name in OURS or name.startswith(SPECULATIVE))


def spreading(engine_args: Mapping[str, Any]) -> list[str]:
    """Names in `engine_args` that spread the target in ways never run."""
    return sorted(SPREADING & {name.replace("-", "_") for name in engine_args})


def surplus_stops(target: Target) -> list[int]:
    """Stop tokens that SGLang adds to the target's: it joins those of config.json and generation_config.json."""
    named = config_of(target).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    return sorted(set(ids) - set(target.eos_token_ids))
