"""The attention of `eager_attention.py` in Triton: one pass over the keys a query sees, own keys merged in registers.

A program of the queries' kernels has one block of queries of one head; one of the keys' kernels has a block of keys of
one key-value head and meets every query of every step and head that looks at it, so that no gradient is added up in
memory. N query heads, G key-value heads, D head size, BM queries, BN keys, W = (N + 2G) D.
"""

# Triton comes with torch for CUDA alone; `kernel[grid]` is its own way to call one.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty_like

from eagle3x.kernels.layout import KEY_BLOCK, QUERY_BLOCK, Heads, Layout

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def attend(qkv: Tensor, step: int, shared: Tensor, layout: Layout, heads: Heads, output: Tensor, lse: Tensor) -> None:
    """See `eager_attention.attend`."""
    _attend[(len(layout.query_blocks), heads.queries)](
        qkv, shared, layout.rows, layout.query_blocks, output, lse, step, qkv.shape[1], heads.scale,
        N=heads.queries, G=heads.keys, D=heads.size, BM=QUERY_BLOCK, BN=64, PRECISION=_precision(qkv),
        num_warps=8, num_stages=3,
    )  # fmt: skip


def attend_backward(
    d_output: Tensor, output: Tensor, lse: Tensor, qkv: Tensor, step: int, shared: Tensor, layout: Layout,
    heads: Heads, delta: Tensor, d_qkv: Tensor,
) -> None:  # fmt: skip
    """See `eager_attention.attend_backward`."""
    _attend_backward[(len(layout.query_blocks), heads.queries)](
        d_output, output, lse, qkv, shared, layout.rows, layout.query_blocks, delta, d_qkv, step, qkv.shape[1],
        heads.scale,
        N=heads.queries, G=heads.keys, D=heads.size, BM=QUERY_BLOCK, BN=64, PRECISION=_precision(qkv),
        num_warps=8, num_stages=3,
    )  # fmt: skip


def own_backward(
    d_output: Tensor, lse: Tensor, delta: Tensor, qkv: Tensor, step: int, heads: Heads, d_qkv: Tensor
) -> None:
    """See `eager_attention.own_backward`."""
    steps, rows, _ = qkv.shape
    _own_backward[(triton.cdiv(rows, 32), heads.keys)](
        d_output, lse, delta, qkv, d_qkv, step, steps, rows, heads.scale,
        N=heads.queries, G=heads.keys, D=heads.size, BM=32, num_warps=4,
    )  # fmt: skip


def shared_backward(
    d_output: Tensor, lse: Tensor, delta: Tensor, qkv: Tensor, shared: Tensor, layout: Layout, heads: Heads
) -> Tensor:
    """See `eager_attention.shared_backward`."""
    result = empty_like(shared).zero_()
    steps, rows, _ = qkv.shape
    _shared_backward[(len(layout.key_blocks), heads.keys)](
        d_output, lse, delta, qkv, shared, layout.rows, layout.key_blocks, result, steps, rows, heads.scale,
        N=heads.queries, G=heads.keys, D=heads.size, BM=64, BN=KEY_BLOCK, PRECISION=_precision(qkv),
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return result


def _precision(x: Tensor) -> str:
    """float32 products are exact, not tf32."""
    return "ieee" if x.element_size() == 4 else "tf32"


@triton.jit
def _visible(acc, peak, total, q, SHARED, at, keys, rows, last, scale, MASKED: tl.constexpr, G: tl.constexpr,
             D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One block of keys under the online softmax, in base 2."""
    d = tl.arange(0, D)
    place = SHARED + at + keys[:, None].to(tl.int64) * (2 * G * D) + d[None, :]
    if MASKED:  # noqa: SIM108 (a choice made at compile time)
        k = tl.load(place, mask=keys[:, None] < last, other=0.0)
    else:
        k = tl.load(place)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    p = tl.exp2(s - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    if MASKED:  # noqa: SIM108 (a choice made at compile time)
        v = tl.load(place + G * D, mask=keys[:, None] < last, other=0.0)
    else:
        v = tl.load(place + G * D)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit(do_not_specialize=["step", "R"])
def _attend(QKV, SHARED, ROWS, BLOCKS, OUT, LSE, step, R, scale, N: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    W: tl.constexpr = (N + 2 * G) * D
    block, head = tl.program_id(0), tl.program_id(1)
    group = head // (N // G)
    first, end = tl.load(BLOCKS + block * 3), tl.load(BLOCKS + block * 3 + 1)
    start = tl.load(BLOCKS + block * 3 + 2)
    slots, d = first + tl.arange(0, BM), tl.arange(0, D)
    alive = slots < end
    rows = tl.load(ROWS + slots, mask=alive, other=0).to(tl.int32)
    rows = tl.maximum(rows, start)  # a slot that is not there sees one key, so that its sum is not 0
    clear = start + (tl.load(ROWS + first).to(tl.int32) + 1 - start) // BN * BN  # keys that every query sees
    last = tl.load(ROWS + end - 1).to(tl.int32) + 1
    at = (step * R + slots).to(tl.int64)
    q = tl.load(QKV + at[:, None] * W + head * D + d[None, :], mask=alive[:, None], other=0.0)
    scale2 = scale * LOG2_E

    acc = tl.zeros([BM, D], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for low in range(start, clear, BN):
        acc, peak, total = _visible(acc, peak, total, q, SHARED, group * D, low + tl.arange(0, BN), rows, last, scale2,
                                    False, G, D, PRECISION)  # fmt: skip
    for low in range(clear, last, BN):
        acc, peak, total = _visible(acc, peak, total, q, SHARED, group * D, low + tl.arange(0, BN), rows, last, scale2,
                                    True, G, D, PRECISION)  # fmt: skip
    for own in range(1, step + 1):
        place = QKV + (own * R + slots).to(tl.int64)[:, None] * W + (N + group) * D + d[None, :]
        k = tl.load(place, mask=alive[:, None], other=0.0).to(tl.float32)
        v = tl.load(place + G * D, mask=alive[:, None], other=0.0).to(tl.float32)
        s = tl.sum(q.to(tl.float32) * k, 1) * scale2
        new_peak = tl.maximum(peak, s)
        fade, p = tl.exp2(peak - new_peak), tl.exp2(s - new_peak)
        acc = acc * fade[:, None] + p[:, None] * v
        total = total * fade + p
        peak = new_peak
    acc = acc / total[:, None]
    tl.store(OUT + at[:, None] * (N * D) + head * D + d[None, :], acc.to(OUT.dtype.element_ty), mask=alive[:, None])
    tl.store(LSE + at * N + head, (peak + tl.log2(total)) * LN_2, mask=alive)


@triton.jit
def _query_gradient(dq, q, do, lse, delta, SHARED, at, keys, rows, last, scale, MASKED: tl.constexpr, G: tl.constexpr,
                    D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    d = tl.arange(0, D)
    place = SHARED + at + keys[:, None].to(tl.int64) * (2 * G * D) + d[None, :]
    if MASKED:
        k = tl.load(place, mask=keys[:, None] < last, other=0.0)
        v = tl.load(place + G * D, mask=keys[:, None] < last, other=0.0)
    else:
        k = tl.load(place)
        v = tl.load(place + G * D)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
    if MASKED:
        p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["step", "R"])
def _attend_backward(DO, OUT, LSE, QKV, SHARED, ROWS, BLOCKS, DELTA, DQKV, step, R, scale, N: tl.constexpr,
                     G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    W: tl.constexpr = (N + 2 * G) * D
    block, head = tl.program_id(0), tl.program_id(1)
    group = head // (N // G)
    first, end = tl.load(BLOCKS + block * 3), tl.load(BLOCKS + block * 3 + 1)
    start = tl.load(BLOCKS + block * 3 + 2)
    slots, d = first + tl.arange(0, BM), tl.arange(0, D)
    alive = slots < end
    rows = tl.load(ROWS + slots, mask=alive, other=0).to(tl.int32)
    clear = start + (tl.load(ROWS + first).to(tl.int32) + 1 - start) // BN * BN
    last = tl.load(ROWS + end - 1).to(tl.int32) + 1
    at = (step * R + slots).to(tl.int64)
    wide = at[:, None] * (N * D) + head * D + d[None, :]
    q = tl.load(QKV + at[:, None] * W + head * D + d[None, :], mask=alive[:, None], other=0.0)
    do = tl.load(DO + wide, mask=alive[:, None], other=0.0)
    o = tl.load(OUT + wide, mask=alive[:, None], other=0.0)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(DELTA + at * N + head, delta, mask=alive)
    lse = tl.load(LSE + at * N + head, mask=alive, other=0.0) * LOG2_E
    scale2 = scale * LOG2_E

    dq = tl.zeros([BM, D], tl.float32)
    for low in range(start, clear, BN):
        dq = _query_gradient(dq, q, do, lse, delta, SHARED, group * D, low + tl.arange(0, BN), rows, last, scale2,
                             False, G, D, PRECISION)  # fmt: skip
    for low in range(clear, last, BN):
        dq = _query_gradient(dq, q, do, lse, delta, SHARED, group * D, low + tl.arange(0, BN), rows, last, scale2,
                             True, G, D, PRECISION)  # fmt: skip
    for own in range(1, step + 1):
        place = QKV + (own * R + slots).to(tl.int64)[:, None] * W + (N + group) * D + d[None, :]
        k = tl.load(place, mask=alive[:, None], other=0.0).to(tl.float32)
        v = tl.load(place + G * D, mask=alive[:, None], other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(q.to(tl.float32) * k, 1) * scale2 - lse)
        dp = tl.sum(do.to(tl.float32) * v, 1)
        dq += (p * (dp - delta))[:, None] * k
    dq = dq * scale
    tl.store(DQKV + at[:, None] * W + head * D + d[None, :], dq.to(DQKV.dtype.element_ty), mask=alive[:, None])


@triton.jit(do_not_specialize=["step", "steps", "R"])
def _own_backward(DO, LSE, DELTA, QKV, DQKV, step, steps, R, scale, N: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                  BM: tl.constexpr):  # fmt: skip
    W: tl.constexpr = (N + 2 * G) * D
    group = tl.program_id(1)
    slots, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    alive = slots < R
    own = (step * R + slots).to(tl.int64)[:, None] * W + (N + group) * D + d[None, :]
    k = tl.load(QKV + own, mask=alive[:, None], other=0.0).to(tl.float32)
    v = tl.load(QKV + own + G * D, mask=alive[:, None], other=0.0).to(tl.float32)
    dk, dv = tl.zeros([BM, D], tl.float32), tl.zeros([BM, D], tl.float32)
    for later in range(step, steps):
        at = (later * R + slots).to(tl.int64)
        for part in range(N // G):
            head = group * (N // G) + part
            q = tl.load(QKV + at[:, None] * W + head * D + d[None, :], mask=alive[:, None], other=0.0).to(tl.float32)
            do = tl.load(DO + at[:, None] * (N * D) + head * D + d[None, :], mask=alive[:, None], other=0.0)
            do = do.to(tl.float32)
            lse = tl.load(LSE + at * N + head, mask=alive, other=0.0) * LOG2_E
            delta = tl.load(DELTA + at * N + head, mask=alive, other=0.0)
            p = tl.exp2(tl.sum(q * k, 1) * (scale * LOG2_E) - lse)
            ds = p * (tl.sum(do * v, 1) - delta)
            dk += ds[:, None] * q
            dv += p[:, None] * do
    tl.store(DQKV + own, (dk * scale).to(DQKV.dtype.element_ty), mask=alive[:, None])
    tl.store(DQKV + own + G * D, dv.to(DQKV.dtype.element_ty), mask=alive[:, None])


@triton.jit(do_not_specialize=["steps", "R"])
def _shared_backward(DO, LSE, DELTA, QKV, SHARED, ROWS, BLOCKS, DSHARED, steps, R, scale, N: tl.constexpr,
                     G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    W: tl.constexpr = (N + 2 * G) * D
    block, group = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(BLOCKS + block * 4), tl.load(BLOCKS + block * 4 + 1)
    slot_first, slot_end = tl.load(BLOCKS + block * 4 + 2), tl.load(BLOCKS + block * 4 + 3)
    keys, d = first + tl.arange(0, BN), tl.arange(0, D)
    there = keys < end
    place = keys.to(tl.int64)[:, None] * (2 * G * D) + group * D + d[None, :]
    k = tl.load(SHARED + place, mask=there[:, None], other=0.0)
    v = tl.load(SHARED + place + G * D, mask=there[:, None], other=0.0)
    dk, dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    scale2 = scale * LOG2_E
    for turn in range(steps * (N // G)):
        step, head = turn // (N // G), group * (N // G) + turn % (N // G)
        for low in range(slot_first, slot_end, BM):
            slots = low + tl.arange(0, BM)
            alive = slots < slot_end
            rows = tl.load(ROWS + slots, mask=alive, other=-1).to(tl.int32)
            at = (step * R + slots).to(tl.int64)
            q = tl.load(QKV + at[:, None] * W + head * D + d[None, :], mask=alive[:, None], other=0.0)
            do = tl.load(DO + at[:, None] * (N * D) + head * D + d[None, :], mask=alive[:, None], other=0.0)
            lse = tl.load(LSE + at * N + head, mask=alive, other=0.0) * LOG2_E
            delta = tl.load(DELTA + at * N + head, mask=alive, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale2 - lse[None, :])
            p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            dk = tl.dot((p * (dp - delta[None, :])).to(q.dtype), q, dk, input_precision=PRECISION)
    tl.store(DSHARED + place, (dk * scale).to(DSHARED.dtype.element_ty), mask=there[:, None])
    tl.store(DSHARED + place + G * D, dv.to(DSHARED.dtype.element_ty), mask=there[:, None])
