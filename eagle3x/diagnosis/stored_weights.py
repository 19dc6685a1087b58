"""A checkpoint's weights in float32, one at a time: what a quantized file says, as numbers.

Where engines round a layer's inputs too, token by token (W8A8), `rounds_inputs` says so. What else an engine rounds
(fp8 activations, its KV cache) is its own doing, and shows as drift.

    what is stored                                     weight
    weight (float)                                     weight
    weight (int8, fp8), weight_scale[, zero_point]     (weight - zero_point) * scale        compressed-tensors
    weight_packed (int32), scale, shape[, zero_point]  unpacked, then as above              compressed-tensors
    weight (fp8), weight_scale_inv                     weight * scale of its block          DeepSeek's and Qwen's fp8
    x_blocks (two e2m1 a byte), x_scales (exponents)   transformers' own function           gpt-oss' mxfp4

A scale is of the tensor [1], a row [R, 1], a group of a row's columns [R, C / group], or a block [R / b, C / b].
Formulas: compressed_tensors 0.18 (`quantization/lifecycle/forward.py`, `compressors/pack_quantized/helpers.py`) and
transformers 5.19 (`integrations/finegrained_fp8.py`, `integrations/mxfp4.py`). Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3x.quantization.stored import quantization_config
from eagle3x.targets import Target
from eagle3x.types import EagleError

READ = ("compressed-tensors", "fp8", "mxfp4")
"""Methods (`quantization_config.quant_method`) whose weights are read here."""
PARTS = ("_scale", "_scale_inv", "_scales", "_zero_point", "_shape", "_g_idx")
"""Ends of the names of what belongs to a quantized weight."""
NO_WEIGHTS = (*PARTS, "_global_scale")
"""Those, and what else says how an engine quantizes: it also ends so (input_scale, k_scale, activation_scale, ..)."""
BITS = (4, 8)
INT8_TOKENS = ("int", 8, "token", True)
"""Type, bits, strategy and `dynamic` of a W8A8 scheme's inputs."""


@dataclass(frozen=True)
class Stored:
    """A weight's parts, codes first: the end of each stored name ("", "_packed", "_scale", ..) to the name."""

    name: str
    parts: Mapping[str, str]


class StoredWeights:
    """The weights of a target's checkpoint, by the names that they would have unquantized. Close it, or use `with`."""

    def __init__(self, target: Target) -> None:
        """Opens the files; EagleError for a quantization that is not read here."""
        self._name = target.name
        quantization = quantization_config(target) or None
        self._block = None if quantization is None else _block(target.name, quantization)
        self._rounds_inputs = quantization is not None and _rounds_inputs(target.name, quantization)
        self._files = ExitStack()
        opened: dict[Path, Any] = {}
        self._where: dict[str, Any] = {}
        for stored, file in target.weight_map.items():
            if file not in opened:
                opened[file] = self._files.enter_context(safe_open(file, framework="pt"))
            self._where[stored] = opened[file]
        plain = [Stored(name, {"": name}) for name in self._where]
        found = plain if quantization is None else _quantized(self._where)
        self._weights = {weight.name: weight for weight in found}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of layers with quantized weights are rounded to 8-bit integers, token by token."""
        return self._rounds_inputs

    def is_quantized(self, name: str) -> bool:
        """Whether this weight is."""
        return len(self._weights[name].parts) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """Of all weights, in the checkpoint's order."""
        return tuple(self._weights)

    def elements(self) -> int:
        """How many numbers the weights are. Reads no more than the files' headers."""
        return sum(self._elements(weight) for weight in self._weights.values())

    def read(self, name: str) -> Tensor:
        """A weight as float32 (indices and such, which are not floating, as they are).

        Raises EagleError for what is stored in a way that is not read here.
        """
        weight = self._weights[name]
        parts = {end: self._where[stored].get_tensor(stored) for end, stored in weight.parts.items()}
        try:
            return _dequantized(parts, self._block)
        except (KeyError, ValueError, RuntimeError) as error:
            shapes = {stored: f"{parts[end].dtype} {list(parts[end].shape)}" for end, stored in weight.parts.items()}
            raise EagleError(f"{self._name}: {name} cannot be dequantized ({error}): stored as {shapes}") from error

    def _elements(self, weight: Stored) -> int:
        if (stored := weight.parts.get("_shape")) is not None:
            return int(self._where[stored].get_tensor(stored).prod())
        whole, stored = next(iter(weight.parts.items()))
        return prod(self._where[stored].get_slice(stored).get_shape()) * (2 if whole == "_blocks" else 1)


def _block(name: str, quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block that a scale is of, where scales are of blocks."""
    method = quantization.get("quant_method")
    if method not in READ or quantization.get("transform_config"):
        what = f"{method} with transforms" if method in READ else method
        raise EagleError(
            f"{name} is quantized by {what}, whose weights are not read here: there is no reference for it; those of"
            f" {', '.join(READ)} are read"
        )
    weights = [group.get("weights") or {} for group in _groups(quantization)]
    blocks = [quantization.get("weight_block_size"), *(w.get("block_structure") for w in weights)]
    found = {tuple(block) for block in blocks if block}
    if len(found) > 1:
        raise EagleError(f"{name} is quantized in blocks of several sizes, {sorted(found)}: not read here")
    return found.pop() if found else None


def _rounds_inputs(name: str, quantization: Mapping[str, Any]) -> bool:
    inputs = [group.get("input_activations") or {} for group in _groups(quantization)]
    found = [
        (i.get("type"), i.get("num_bits"), i.get("strategy"), bool(i.get("dynamic"))) == INT8_TOKENS for i in inputs
    ]
    if any(found) and not all(found):
        raise EagleError(f"{name} rounds the inputs of some of its quantized layers alone: not read here")
    return any(found)


def _groups(quantization: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list((quantization.get("config_groups") or {}).values())


def _quantized(stored: Collection[str]) -> list[Stored]:
    found = []
    for name in stored:
        if name.endswith(NO_WEIGHTS):
            continue
        whole = next((end for end in ("_packed", "_blocks") if name.endswith(end)), "")
        base = name.removesuffix(whole)
        found.append(Stored(base, {whole: name, **{end: base + end for end in PARTS if base + end in stored}}))
    return found


def _dequantized(parts: Mapping[str, Tensor], block: tuple[int, int] | None) -> Tensor:
    if "_blocks" in parts:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
    if "_packed" in parts:
        packed, shape = parts["_packed"], parts["_shape"].tolist()
        if packed.dtype != torch.int32:
            raise ValueError(f"packed as {packed.dtype}, where int32 is read")
        bits = _bits(packed.shape[1], shape[1])
        codes = _unpacked(packed, bits)[:, : shape[1]]
        if (zero_point := parts.get("_zero_point")) is not None:
            zero_point = _unpacked(zero_point.T.contiguous(), bits)[:, : shape[0]].T
    else:
        codes, zero_point = parts[""], parts.get("_zero_point")
    scale = parts.get("_scale", parts.get("_scale_inv"))
    if scale is None:
        if codes.element_size() == 1 and codes.dtype != torch.bool:
            raise ValueError("no scale")
        return codes.float() if codes.is_floating_point() else codes
    if not scale.is_floating_point():
        raise ValueError(f"scales of {scale.dtype}")
    if "_g_idx" in parts:
        raise ValueError("columns in the order of their activations")
    if codes.dim() != 2:
        raise ValueError("it has not two dimensions")
    weight = codes.float()
    if zero_point is not None:
        weight -= _spread(zero_point.float(), weight.shape, block)
    return weight * _spread(scale.float(), weight.shape, block)


def _bits(packed: int, columns: int) -> int:
    """Bits of a value, from how many int32 hold a row."""
    for bits in BITS:
        if packed == -(-columns * bits // 32):
            return bits
    raise ValueError(f"{columns} columns in {packed} int32 are not of {' or '.join(map(str, BITS))} bits")


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """[R, P] int32 -> [R, P * 32 / bits]: the lowest bits first, each value offset by half of its range."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return values.flatten(1) - (1 << (bits - 1))


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """A scale to be multiplied with a weight of `shape` [R, C]."""
    scale = scale[:, None] if scale.dim() == 1 else scale.reshape(scale.shape or (1, 1))
    for dim, size in enumerate(shape):
        parts = scale.shape[dim]
        if parts in (1, size):
            continue
        if block is None and size % parts == 0:
            each = size // parts
        elif block is not None and parts == -(-size // block[dim]):  # the last block may be cut off
            each = block[dim]
        else:
            raise ValueError(f"{parts} scales for {size} {'columns' if dim else 'rows'}")
        scale = scale.repeat_interleave(each, dim).narrow(dim, 0, size)
    return scale
