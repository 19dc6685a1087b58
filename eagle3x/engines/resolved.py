"""What a slot's settings come to on this device, alike for vLLM and SGLang. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from eagle3x.engines.gpus import gpu_memory_bytes
from eagle3x.quantization.in_slot import ONLINE
from eagle3x.quantization.stored import quantization_config

if TYPE_CHECKING:
    from eagle3x.config import Hardware
    from eagle3x.engines.config import Slot
    from eagle3x.targets import Target

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}
"""Engines as they write themselves."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def is_mla(target: Target) -> bool:
    """Whether the target has multi-head latent attention, as its config tells it."""
    return "kv_lora_rank" in config_of(target)


def config_of(target: Target) -> dict[str, Any]:
    """The target's config.json, the part that describes its language model."""
    raw = json.loads((target.path / "config.json").read_text(encoding="utf-8"))
    return {**raw, **raw.get("text_config", {})}


def resolved_dtype(slot: Slot, hardware: Hardware) -> str:
    """`auto` is float32 on the CPU (bfloat16 is slow or absent there) and bfloat16 on a GPU."""
    if slot.backend.dtype != "auto":
        return slot.backend.dtype
    return "float32" if hardware.device == "cpu" else "bfloat16"


def quantization_argument(slot: Slot) -> str | None:
    """The engine's `quantization`: "fp8" for weights rounded while loading; else the checkpoint says what it is."""
    return "fp8" if slot.quantization.scheme == ONLINE else None


def reported_quantization(slot: Slot, target: Target) -> str | None:
    """What the engine calls the quantization that it then runs; None: it has none."""
    stored = quantization_config(target)
    return stored["quant_method"] if stored else quantization_argument(slot)


def both_fit(slot: Slot, target: Target, hardware: Hardware) -> bool:
    """Whether two servers of the target fit: always on a CPU (small targets), on a GPU if the weights take at most half
    of a server's share."""
    if hardware.device == "cpu":
        return True
    weights = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
    share = slot.backend.memory_fraction * gpu_memory_bytes(hardware) / 2
    return weights / slot.backend.tensor_parallel <= share / 2


def kv_bytes_per_token(target: Target, dtype: str) -> int:
    """Keys and values of one token in all blocks (an upper bound for latent attention)."""
    return 2 * target.num_blocks * target.num_kv_heads * target.head_dim * DTYPE_BYTES[dtype]
