"""What vLLM is told: a slot of the config as its arguments and environment, and what it would not honour. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3x.engines.resolved import is_mla, kv_bytes_per_token, quantization_argument, resolved_dtype
from eagle3x.types import ConfigError

if TYPE_CHECKING:
    from eagle3x.config import Hardware
    from eagle3x.engines.config import Slot
    from eagle3x.targets import Target

Runner = Literal["v1", "v2"]

ATTENTION = {"flash_attn": "FLASH_ATTN", "triton": "TRITON_ATTN", "flashinfer": "FLASHINFER"}
"""Names of `attention=` on a GPU, for targets with ordinary attention."""
MLA_ATTENTION = {"flash_attn": "FLASH_ATTN_MLA", "triton": "TRITON_MLA", "flashinfer": "FLASHINFER_MLA"}
"""The same for multi-head latent attention (DeepSeek, Kimi)."""
CPU_ATTENTION, CPU_MLA_ATTENTION = "CPU_ATTN", "CPU_MLA"
"""The only kernels on a CPU: vLLM logs that it cannot use another, and goes on with these."""

STATES_KV_DTYPES = ("auto", "bfloat16", "float16")
"""KV cache types with which `extract_hidden_states` runs (models/extract_hidden_states.py, CacheOnlyAttentionLayer)."""

OURS = frozenset(
    {
        "model", "tokenizer", "dtype", "kv_cache_dtype", "quantization", "attention_backend", "tensor_parallel_size",
        "speculative_config", "kv_transfer_config", "worker_extension_cls", "max_num_seqs", "max_model_len",
        "enable_prefix_caching", "enable_chunked_prefill", "skip_tokenizer_init", "generation_config", "host", "port",
        "trust_remote_code", "gpu_memory_utilization", "seed",
    }
)  # fmt: skip
"""Arguments that other config nodes decide, or that would change what is measured."""

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Prompt tokens of one engine step, at least; more if one sequence is longer."""
BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
"""Tokens of a KV cache block: vLLM's defaults, set so that both sides of a comparison have the same."""
GIB = 1024**3


def resolved_runner(slot: Slot) -> Runner:
    """`auto` is v1, which every tested version has; vLLM itself would choose by version, platform and features."""
    return "v2" if slot.backend.runner == "v2" else "v1"


def resolved_attention(slot: Slot, target: Target, hardware: Hardware, capability: str | None) -> str:
    """The backend that vLLM is told to use; `auto` is its own first choice for this device and dtype.

    vllm/platforms/cuda.py:_get_backend_priorities: FlashInfer on compute capability 10, else FlashAttention. Of
    those only Triton computes in float32.

    Raises:
        ConfigError: a name that vLLM has not on this device.
    """
    mla, name = is_mla(target), slot.attention.name
    if hardware.device == "cpu":
        if name != "auto":
            raise ConfigError(
                f"attention={name}: vLLM has one attention backend on a CPU and silently falls back to it; use"
                " attention=auto"
            )
        return CPU_MLA_ATTENTION if mla else CPU_ATTENTION
    known = MLA_ATTENTION if mla else ATTENTION
    if name == "auto":
        blackwell = (capability or "").startswith("10.")
        name = "triton" if resolved_dtype(slot, hardware) == "float32" else "flashinfer" if blackwell else "flash_attn"
    if name not in known:
        raise ConfigError(f"attention={name}: vLLM has {', '.join(known)} on a GPU, or auto")
    return known[name]


def arguments(slot: Slot, target: Target, hardware: Hardware, attention: str, longest: int) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` that generating, capturing and serving share.

    longest: tokens of the longest sequence. No prefix cache: a repeated prompt must cost what a new one costs.
    """
    backend = slot.backend
    shared: dict[str, Any] = {
        "model": str(target.path),
        "dtype": resolved_dtype(slot, hardware),
        "kv_cache_dtype": backend.kv_cache_dtype,
        "tensor_parallel_size": backend.tensor_parallel,
        "max_num_seqs": backend.batch_size,
        "max_model_len": longest,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "trust_remote_code": target.trust_remote_code,
        "seed": 0,
    }
    if (quantization := quantization_argument(slot)) is not None:
        shared["quantization"] = quantization
    if hardware.device == "cpu":
        shared["enforce_eager"] = True  # compiling takes longer than a small target's whole work
    else:
        shared["attention_backend"] = attention
        shared["gpu_memory_utilization"] = backend.memory_fraction
    return {**shared, **backend.engine_args}


def capture_arguments(layer_ids: Sequence[int], boundaries: int, ring: str, step_tokens: int) -> dict[str, Any]:
    """Arguments that make vLLM capture these layers into the ring at this path: whole prompts, `step_tokens` a step.

    The first `boundaries` of the layers are for the drafter, the last of them all is the last hidden state.
    """
    spec = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": spec},
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"ring": ring, "boundaries": boundaries},
        },
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": step_tokens,
    }


def environment(slot: Slot, target: Target, hardware: Hardware, longest: int, python: Path) -> dict[str, str]:
    """Environment variables of every vLLM process that we start with the interpreter `python`."""
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if resolved_runner(slot) == "v2" else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the target is a directory: nothing may be fetched in its place
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # by the one token that no one asks for; samples are checked before
    }
    if hardware.device == "cpu":
        threads = hardware.threads or os.cpu_count() or 1
        variables |= {
            "OMP_NUM_THREADS": str(threads),
            "TORCHDYNAMO_DISABLE": "1",  # eager as the model: the first request for log-probabilities compiles for 26 s
            # The engine computes in its own process, where a worker would be one more: 15 s of imports, a core that
            # waits for messages in a busy loop, and a message a step. (OpenMP's variables, for which vLLM wants a
            # worker, are set here.)
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else a core is set aside, and two servers share one
            "VLLM_CPU_KVCACHE_SPACE": str(cpu_cache_gib(slot, target, hardware, longest)),
        }
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        if openmp.is_file():  # vLLM: speculation is much slower with torch's own (20 % on two cores)
            variables["LD_PRELOAD"] = str(openmp)
    elif hardware.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in hardware.devices)
    return variables


def cpu_cache_gib(slot: Slot, target: Target, hardware: Hardware, longest: int) -> int:
    """GiB of KV cache that a full batch of the longest sequences needs, at most a quarter of the memory."""
    needed = slot.backend.batch_size * longest * kv_bytes_per_token(target, resolved_dtype(slot, hardware))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(math.ceil(needed / GIB), memory // 4 // GIB))


def reserved(engine_args: Mapping[str, Any]) -> list[str]:
    """Names in `engine_args` that are not the user's to give there."""
    return sorted(OURS & {name.replace("-", "_") for name in engine_args})
