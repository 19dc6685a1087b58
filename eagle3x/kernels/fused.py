"""The functions of `eager.py` in Triton, each tensor read and written once. A program has one row unless it says more.

Shapes as in `eager.py`. Arithmetic is float32, whatever the tensors hold.
"""

# Triton comes with torch for CUDA alone; `kernel[grid]` is its own way to call one.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3x.kernels.fused_attention import attend, attend_backward, own_backward, shared_backward
from eagle3x.kernels.fused_loss import soft_cross_entropy_, softmax
from eagle3x.kernels.layout import Heads, Layout

__all__ = [
    "add_unit", "attend", "attend_backward", "fold", "own_backward", "rotate_", "shared_backward", "shifted_sum",
    "soft_cross_entropy_", "softmax", "swiglu", "swiglu_backward_", "unfold_", "unit", "unit_backward", "unit_rows",
    "unrotate_",
]  # fmt: skip


def _warps(width: int) -> int:
    """16 values a thread, 1 to 16 warps."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))


def unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `eager.unit`."""
    rows, width = x.shape
    out, scale = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    _unit[(rows,)](
        x, x, x, out, out, scale, eps, width,
        ADD=False, INDEXED=False, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return out, scale


def unit_rows(table: Tensor, index: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `eager.unit_rows`."""
    rows, width = len(index), table.shape[-1]
    out = torch.empty(rows, width, dtype=dtype, device=table.device)
    scale = torch.empty(rows, dtype=torch.float32, device=table.device)
    _unit[(rows,)](
        table, table, index, out, out, scale, eps, width,
        ADD=False, INDEXED=True, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return out


def add_unit(a: Tensor, b: Tensor, eps: float, out: Tensor) -> tuple[Tensor, Tensor]:
    """See `eager.add_unit`."""
    rows, width = a.shape
    total, scale = torch.empty_like(a), torch.empty(rows, dtype=torch.float32, device=a.device)
    _unit[(rows,)](
        a, b, a, out, total, scale, eps, width,
        ADD=True, INDEXED=False, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return total, scale


@triton.jit
def _unit(A, B, INDEX, OUT, TOTAL, SCALE, eps, width, ADD: tl.constexpr, INDEXED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    here = i < width
    source = tl.load(INDEX + row).to(tl.int64) if INDEXED else row
    x = tl.load(A + source * width + i, mask=here, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(B + row * width + i, mask=here, other=0.0).to(tl.float32)
        x = x.to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + row * width + i, x, mask=here)
        x = x.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(OUT + row * width + i, (x * scale).to(OUT.dtype.element_ty), mask=here)
    tl.store(SCALE + row, scale)


def unit_backward(
    d_unit: Tensor, hat: Tensor, scale: Tensor, also: Tensor | None = None, add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `eager.unit_backward`."""
    rows, width = d_unit.shape
    out = torch.empty_like(d_unit) if out is None else out
    _unit_backward[(rows,)](
        d_unit, d_unit if also is None else also, d_unit if add is None else add, hat, scale, out, width,
        ALSO=also is not None, ADD=add is not None, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return out


@triton.jit
def _unit_backward(D_UNIT, ALSO_D, ADDED, HAT, SCALE, OUT, width, ALSO: tl.constexpr, ADD: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    here = i < width
    at = row * width + i
    d = tl.load(D_UNIT + at, mask=here, other=0.0).to(tl.float32)
    if ALSO:
        d += tl.load(ALSO_D + at, mask=here, other=0.0).to(tl.float32)
    hat = tl.load(HAT + at, mask=here, other=0.0).to(tl.float32)
    result = tl.load(SCALE + row) * (d - hat * (tl.sum(d * hat, 0) / width))
    if ADD:
        result += tl.load(ADDED + at, mask=here, other=0.0).to(tl.float32)
    tl.store(OUT + at, result.to(OUT.dtype.element_ty), mask=here)


PARTS = {"qkv": (True, True), "q": (True, False), "kv": (False, True)}


def rotate_(
    x: Tensor, from_tokens: Tensor, rows: Tensor | None, positions: Tensor, shift: int, angles: tuple[Tensor, Tensor],
    heads: Heads, part: str,
) -> None:  # fmt: skip
    """See `eager.rotate_`."""
    _rotate(x, from_tokens, rows, positions, shift, angles, heads, part, forward=True)


def unrotate_(
    x: Tensor, rows: Tensor | None, positions: Tensor, shift: int, angles: tuple[Tensor, Tensor], heads: Heads,
    part: str,
) -> None:  # fmt: skip
    """See `eager.unrotate_`."""
    _rotate(x, x, rows, positions, shift, angles, heads, part, forward=False)


def _rotate(
    x: Tensor, from_tokens: Tensor, rows: Tensor | None, positions: Tensor, shift: int, angles: tuple[Tensor, Tensor],
    heads: Heads, part: str, forward: bool,
) -> None:  # fmt: skip
    q, kv = PARTS[part]
    count = (heads.queries if q else 0) + (2 * heads.keys if kv else 0)
    rotated = count - heads.keys if kv else count
    _turn[(len(x),)](
        x, from_tokens, positions if rows is None else rows, positions, *angles, shift, len(positions), x.stride(0),
        FIRST=0 if q else heads.queries, COUNT=count, ROTATED=rotated, WIDTH=heads.width, HALF=heads.size // 2,
        INDEXED=rows is not None, FORWARD=forward, BLOCK=triton.next_power_of_2(count),
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["shift", "total"])
def _turn(X, TOKENS, ROWS, POSITIONS, COS, SIN, shift, total, stride, FIRST: tl.constexpr, COUNT: tl.constexpr,
          ROTATED: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, INDEXED: tl.constexpr,
          FORWARD: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    slot = tl.program_id(0)
    row = tl.load(ROWS + slot).to(tl.int32) if INDEXED else slot
    position = tl.load(POSITIONS + row) + shift
    h, d = tl.arange(0, BLOCK), tl.arange(0, HALF)
    here = (h < COUNT)[:, None]
    at = h[:, None] * (2 * HALF) + d[None, :]
    place = X + slot.to(tl.int64) * stride + at
    a = tl.load(place, mask=here, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=here, other=0.0).to(tl.float32)
    cos, sin = tl.load(COS + position * HALF + d)[None, :], tl.load(SIN + position * HALF + d)[None, :]
    if FORWARD:
        token = TOKENS + tl.minimum(row + 1 + shift, total - 1).to(tl.int64) * WIDTH + FIRST * 2 * HALF + at
        a += tl.load(token, mask=here, other=0.0).to(tl.float32)
        b += tl.load(token + HALF, mask=here, other=0.0).to(tl.float32)
    else:
        sin = -sin
    turned = (h < ROTATED)[:, None]
    first, second = tl.where(turned, a * cos - b * sin, a), tl.where(turned, b * cos + a * sin, b)
    tl.store(place, first.to(X.dtype.element_ty), mask=here)
    tl.store(place + HALF, second.to(X.dtype.element_ty), mask=here)


def shifted_sum(d_qkv: Tensor, d_shared: Tensor, layout: Layout, heads: Heads) -> Tensor:
    """See `eager.shifted_sum`."""
    steps, rows, width = d_qkv.shape
    total = len(layout.slots)
    result = d_qkv.new_empty(total, width)
    block = 1024
    _shifted_sum[(total, triton.cdiv(width, block))](
        d_qkv, d_shared, layout.slots, result, steps, rows, total, Q=heads.query_width, WIDTH=width, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["steps", "R", "total"])
def _shifted_sum(DQKV, DSHARED, SLOTS, OUT, steps, R, total, Q: tl.constexpr, WIDTH: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < WIDTH
    acc = tl.zeros([BLOCK], tl.float32)
    beyond = tl.where(token == total - 1, steps, 1)  # the last token stands in for those after it
    for over in range(beyond):
        row = token + over - 1
        if (row >= 0) & (row < total):
            source = DSHARED + row.to(tl.int64) * (WIDTH - Q) + i - Q
            acc += tl.load(source, mask=here & (i >= Q), other=0.0).to(tl.float32)
        for step in range(steps):
            row = token + over - 1 - step
            slot = tl.load(SLOTS + row, mask=(row >= 0) & (row < total), other=-1)
            if slot >= 0:
                source = DQKV + (step * R + slot).to(tl.int64) * WIDTH + i
                acc += tl.load(source, mask=here & ((step > 0) | (i < Q)), other=0.0).to(tl.float32)
    tl.store(OUT + token.to(tl.int64) * WIDTH + i, acc.to(OUT.dtype.element_ty), mask=here)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """See `eager.swiglu`."""
    rows, width = out.shape
    block = 2048
    _swiglu[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)


@triton.jit
def _swiglu(GATE_UP, OUT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < width
    gate = tl.load(GATE_UP + row * 2 * width + i, mask=here, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + (row * 2 + 1) * width + i, mask=here, other=0.0).to(tl.float32)
    tl.store(OUT + row * width + i, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), mask=here)


def swiglu_backward_(gate_up: Tensor, d_out: Tensor) -> None:
    """See `eager.swiglu_backward_`."""
    rows, width = d_out.shape
    block = 2048
    _swiglu_backward[(rows, triton.cdiv(width, block))](gate_up, d_out, width, BLOCK=block, num_warps=4)


@triton.jit
def _swiglu_backward(GATE_UP, D_OUT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < width
    gate_at, up_at = GATE_UP + row * 2 * width + i, GATE_UP + (row * 2 + 1) * width + i
    gate = tl.load(gate_at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_at, mask=here, other=0.0).to(tl.float32)
    d = tl.load(D_OUT + row * width + i, mask=here, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(up_at, (d * silu).to(GATE_UP.dtype.element_ty), mask=here)
    tl.store(gate_at, (d * up * (sigmoid + silu * (1 - sigmoid))).to(GATE_UP.dtype.element_ty), mask=here)


def fold(weight: Tensor, gain: Tensor | None, out: Tensor) -> None:
    """See `eager.fold`."""
    rows, width = weight.shape
    block = 2048
    _fold[(rows, triton.cdiv(width, block))](
        weight, weight if gain is None else gain, out, weight.stride(0), out.stride(0), width,
        GAIN=gain is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _fold(WEIGHT, GAINS, OUT, stride, out_stride, width, GAIN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < width
    x = tl.load(WEIGHT + row * stride + i, mask=here, other=0.0)
    if GAIN:
        x = x * tl.load(GAINS + i, mask=here, other=0.0)
    tl.store(OUT + row * out_stride + i, x.to(OUT.dtype.element_ty), mask=here)


UNFOLD_ROWS = 256


def unfold_(d_folded: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
    """See `eager.unfold_`. A program has `UNFOLD_ROWS` rows of a few columns, whose sums are added up in torch."""
    rows, width = weight.shape
    block = 128
    splits = triton.cdiv(rows, UNFOLD_ROWS)
    sums = torch.empty(splits, width, dtype=torch.float32, device=weight.device)
    _unfold[(triton.cdiv(width, block), splits)](
        d_folded, weight, gain, sums, d_folded.stride(0), weight.stride(0), rows, width,
        ROWS=UNFOLD_ROWS, STEP=16, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return sums.sum(0)


@triton.jit
def _unfold(D, WEIGHT, GAINS, SUMS, stride, weight_stride, rows, width, ROWS: tl.constexpr, STEP: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.program_id(1)
    here = (i < width)[None, :]
    gain = tl.load(GAINS + i, mask=i < width, other=0.0)[None, :]
    acc = tl.zeros([STEP, BLOCK], tl.float32)
    for low in range(0, ROWS, STEP):
        row = (split * ROWS + low + tl.arange(0, STEP)).to(tl.int64)[:, None]
        mask = here & (row < rows)
        d = tl.load(D + row * stride + i[None, :], mask=mask, other=0.0)
        w = tl.load(WEIGHT + row * weight_stride + i[None, :], mask=mask, other=0.0)
        acc += d * w
        tl.store(D + row * stride + i[None, :], d * gain, mask=mask)
    tl.store(SUMS + split * width + i, tl.sum(acc, 0), mask=i < width)
