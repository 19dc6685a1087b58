"""How a target's checkpoint is stored: not quantized, or by which scheme. Read from its config.json; no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from eagle3x.types import ConfigError

if TYPE_CHECKING:
    from eagle3x.targets import Target

ROUNDED_INPUTS = ("int8", "fp8", "fp8_online", "nvfp4")
"""Schemes of which a layer's inputs are rounded as well as its weights. What lies between two codes may become either,
by an order of sums: two engines, or two batches of one, then differ by a whole code."""


def quantization_config(target: Target) -> dict[str, Any]:
    """As the checkpoint has it; empty if it is not quantized."""
    raw = json.loads((target.path / "config.json").read_text(encoding="utf-8"))
    return raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config") or {}


def stored_scheme(target: Target) -> str:
    """`none`, or the scheme that the checkpoint's `quantization_config` names.

    Raises:
        ConfigError: a scheme that none of ours is.
    """
    found = quantization_config(target)
    if not found:
        return "none"
    method = found.get("quant_method")
    kinds = {(weights.get("type"), weights.get("num_bits")) for weights in _weights(found)}
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


def stored_as(target: Target) -> str:
    """For people, e.g. `int4 (compressed-tensors, pack-quantized, groups of 32)`, or `not quantized`."""
    found = quantization_config(target)
    if not found:
        return "not quantized"
    sizes = {weights.get("group_size") for weights in _weights(found)} or {found.get("group_size")}
    details = [found["quant_method"], found.get("format"), *(f"groups of {size}" for size in sizes if size)]
    return f"{stored_scheme(target)} ({', '.join(str(detail) for detail in details if detail)})"


def _weights(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [group.get("weights") or {} for group in (found.get("config_groups") or {}).values()]
