"""The distributions over a vocabulary of `eager.py` in Triton. A program has one row and walks it twice.

The first walk keeps a running maximum and sum in every lane and joins them at its end; the second finds what the first
read in the cache.
"""

# Triton comes with torch for CUDA alone; `kernel[grid]` is its own way to call one.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


def softmax(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `eager.softmax`."""
    rows, width = logits.shape
    out = torch.empty(rows, width, dtype=dtype, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _softmax[(rows,)](logits, out, best, width, BLOCK=_block(width), num_warps=WARPS)
    return out, best


def soft_cross_entropy_(z: Tensor, p: Tensor, best: Tensor, label: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `eager.soft_cross_entropy_`."""
    rows, width = z.shape
    loss = torch.empty(rows, dtype=torch.float32, device=z.device)
    right = torch.empty(rows, dtype=torch.bool, device=z.device)
    _soft_cross_entropy[(rows,)](z, p, best, label, scale, loss, right, width, BLOCK=_block(width), num_warps=WARPS)
    return loss, right


def _block(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))


@triton.jit
def _joined(peak, total, at, i):
    """Maximum, sum and argmax of a row from those of its lanes."""
    top = tl.max(peak, 0)
    return top, tl.sum(total * tl.exp(peak - top), 0), tl.min(tl.where(peak == top, at, 2147483647), 0)


@triton.jit
def _softmax(LOGITS, OUT, BEST, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    peak, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    for low in range(0, width, BLOCK):
        here = low + i < width
        z = tl.load(LOGITS + row * width + low + i, mask=here, other=float("-inf")).to(tl.float32)
        new = tl.maximum(peak, z)
        total = total * tl.exp(peak - new) + tl.exp(z - new)
        at = tl.where(z > peak, low + i, at)
        peak = new
    top, mass, best = _joined(peak, total, at, i)
    tl.store(BEST + row, best.to(tl.int64))
    for low in range(0, width, BLOCK):
        here = low + i < width
        z = tl.load(LOGITS + row * width + low + i, mask=here, other=float("-inf")).to(tl.float32)
        tl.store(OUT + row * width + low + i, (tl.exp(z - top) / mass).to(OUT.dtype.element_ty), mask=here)


@triton.jit
def _soft_cross_entropy(Z, P, BEST, LABEL, SCALE, LOSS, RIGHT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABEL + row)
    i = tl.arange(0, BLOCK)
    peak, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    product, share = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for low in range(0, width, BLOCK):
        here = low + i < width
        z = tl.load(Z + row * width + low + i, mask=here, other=float("-inf")).to(tl.float32)
        p = tl.load(P + label * width + low + i, mask=here, other=0.0).to(tl.float32)
        new = tl.maximum(peak, z)
        total = total * tl.exp(peak - new) + tl.exp(z - new)
        at = tl.where(z > peak, low + i, at)
        peak = new
        product += tl.where(here, p * z, 0.0)
        share += p
    top, mass, best = _joined(peak, total, at, i)
    lse, share_sum = top + tl.log(mass), tl.sum(share, 0)
    tl.store(LOSS + row, lse * share_sum - tl.sum(product, 0))
    tl.store(RIGHT + row, best == tl.load(BEST + label))
    scale = tl.load(SCALE + row).to(tl.float32)
    for low in range(0, width, BLOCK):
        here = low + i < width
        z = tl.load(Z + row * width + low + i, mask=here, other=float("-inf")).to(tl.float32)
        p = tl.load(P + label * width + low + i, mask=here, other=0.0).to(tl.float32)
        gradient = (share_sum * tl.exp(z - lse) - p) * scale
        tl.store(Z + row * width + low + i, gradient.to(Z.dtype.element_ty), mask=here)
