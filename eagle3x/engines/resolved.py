"""What a slot's settings come to on this device, alike for vLLM and SGLang. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from eagle3x.engines.gpus import gpu_memory_bytes
from eagle3x.types import ConfigError

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


def checkpoint_scheme(target: Target) -> str:
    """How the target's weights are stored: `none`, or the scheme that its `quantization_config` names.

    Raises:
        ConfigError: a scheme that none of ours is.
    """
    found = config_of(target).get("quantization_config")
    if not found:
        return "none"
    method = found.get("quant_method")
    groups = [group.get("weights") or {} for group in (found.get("config_groups") or {}).values()]
    kinds = {(weights.get("type"), weights.get("num_bits")) for weights in groups}
    match method, sorted(kinds, key=str):
        case "fp8", _:
            return "fp8"
        case "compressed-tensors", [("float", 8)]:
            return "fp8"
        case "compressed-tensors", [("int", 8)]:
            return "int8"
        case "compressed-tensors", [("int", 4)]:
            return "int4"
        case "compressed-tensors", [("float", 4)]:
            return "nvfp4"
        case (("gptq" | "awq"), _) if found.get("bits") in (4, 8):
            return f"int{found['bits']}"
        case _:
            raise ConfigError(
                f"target {target.name}: quantization_config {method} {sorted(kinds, key=str)} is not known"
            )


def quantization_argument(slot: Slot, target: Target, hardware: Hardware) -> str | None:
    """The engine's `quantization`: None where the checkpoint says it itself, "fp8" for weights quantized while loading.

    Raises:
        ConfigError: the checkpoint is not stored as the slot says, and the engine cannot make it so.
    """
    wanted, stored = slot.quantization.scheme, checkpoint_scheme(target)
    if wanted == stored:
        return None
    if stored != "none":
        raise ConfigError(
            f"quantization={wanted}: target {target.name} is stored as {stored}; use quantization={stored}"
        )
    if wanted == "fp8" and hardware.device == "cuda":
        return "fp8"
    where = " on a CPU" if hardware.device == "cpu" else ""
    raise ConfigError(
        f"quantization={wanted}: target {target.name} is not quantized, and {ENGINES[slot.backend.name]} makes no"
        f" {wanted} weights while loading{where}; give a {wanted} checkpoint as the target"
    )


def reported_quantization(slot: Slot, target: Target, hardware: Hardware) -> str | None:
    """What the engine calls the quantization that it then runs; None: it has none."""
    stored = config_of(target).get("quantization_config")
    return stored["quant_method"] if stored else quantization_argument(slot, target, hardware)


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
