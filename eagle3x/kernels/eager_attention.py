"""Attention of the training-time test (TTT), exact and without a T x kT mask.

At step k a query reads step 0's keys of its document, causally, and its own row's keys of steps 1..k. The first part
gives an output o and a log-sum-exp l; the k own scores s_m are scalar products, and both parts merge under one
normaliser:  L = logaddexp(l, s_1..s_k),  O = exp(l - L) o + sum_m exp(s_m - L) v_m.

Given O and L, the backward of each part is that of plain attention with the merged normaliser (FlashAttention-2,
Dao 2023, section 3.1: ds = p (dp - rowsum(dO * O))). So nothing of size queries x keys is kept, and no more than one
block of queries exists at a time. A key of step m is looked at by the queries of steps m.., so its gradient is
worked out once, when theirs are known; that of step 0's keys last of all.

Shapes as in `eager.py`. qkv [K, R, W] holds each step's rotated queries, keys and values (step 0: queries only),
shared [T, 2Gd] step 0's keys and values; output, d_output [K, R, Nd]; lse, delta [K, R, N].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3x.kernels.layout import Heads, Layout


@dataclass(frozen=True)
class _Block:
    """Slots of queries, rows of the keys that they may see, and what of that lies in the future [r * N/G, L]."""

    slots: slice
    keys: slice
    future: Tensor


def attend(qkv: Tensor, step: int, shared: Tensor, layout: Layout, heads: Heads, output: Tensor, lse: Tensor) -> None:
    """Write output[step] and lse[step]."""
    query = qkv[step, :, : heads.query_width].unflatten(-1, (heads.queries, heads.size))
    key, value = _shared(shared, heads)
    merged, normaliser = output[step].unflatten(-1, (heads.queries, heads.size)), lse[step]
    for block in _blocks(layout, heads):
        q = _grouped(query[block.slots], heads)
        scores = torch.bmm(q, key[block.keys].permute(1, 2, 0)).mul_(heads.scale)
        scores.masked_fill_(block.future, float("-inf"))
        part = torch.logsumexp(scores, dim=-1, keepdim=True)
        merged[block.slots] = _ungrouped(torch.bmm(scores.sub_(part).exp_(), value[block.keys].transpose(0, 1)), heads)
        normaliser[block.slots] = _ungrouped(part, heads)[..., 0]
    own = [_own_scores(query, qkv, m, heads) for m in range(1, step + 1)]
    if own:
        shared_lse = normaliser.clone()
        normaliser.copy_(torch.logsumexp(torch.stack([shared_lse, *own]), dim=0))
        merged *= torch.exp(shared_lse - normaliser)[..., None]
        for m, scores in enumerate(own, 1):
            weight = torch.exp(scores - normaliser)[..., None]
            _per_group(merged, heads).addcmul_(_per_group(weight, heads), _own(qkv, m, heads)[1][:, :, None])


def attend_backward(
    d_output: Tensor, output: Tensor, lse: Tensor, qkv: Tensor, step: int, shared: Tensor, layout: Layout,
    heads: Heads, delta: Tensor, d_qkv: Tensor,
) -> None:  # fmt: skip
    """Write delta[step] = rowsum(d_output * output), and the gradient of the step's queries into d_qkv[step]."""
    query = qkv[step, :, : heads.query_width].unflatten(-1, (heads.queries, heads.size))
    grad = d_output[step].unflatten(-1, (heads.queries, heads.size))
    delta[step] = (grad * output[step].unflatten(-1, (heads.queries, heads.size))).sum(-1)
    d_query = d_qkv[step, :, : heads.query_width].unflatten(-1, (heads.queries, heads.size))
    key, value = _shared(shared, heads)
    for block in _blocks(layout, heads):
        q, d_out = _grouped(query[block.slots], heads), _grouped(grad[block.slots], heads)
        normaliser, d = (_grouped(x[step, block.slots, :, None], heads) for x in (lse, delta))
        _, ds = _probabilities(q, d_out, normaliser, d, key[block.keys], value[block.keys], block.future, heads.scale)
        d_query[block.slots] = _ungrouped(torch.bmm(ds, key[block.keys].transpose(0, 1)), heads)
    for m in range(1, step + 1):
        _, ds = _own_probabilities(query, grad, lse[step], delta[step], qkv, m, heads)
        _per_group(d_query, heads).addcmul_(_per_group(ds, heads), _own(qkv, m, heads)[0][:, :, None])


def own_backward(
    d_output: Tensor, lse: Tensor, delta: Tensor, qkv: Tensor, step: int, heads: Heads, d_qkv: Tensor
) -> None:
    """Write the gradient of the step's own keys and values into d_qkv[step]; steps from it on are known."""
    width = heads.query_width
    d_key, d_value = (part.unflatten(-1, (heads.keys, heads.size)) for part in d_qkv[step, :, width:].chunk(2, dim=-1))
    d_key.zero_()
    d_value.zero_()
    for later in range(step, len(qkv)):
        query = qkv[later, :, :width].unflatten(-1, (heads.queries, heads.size))
        grad = d_output[later].unflatten(-1, (heads.queries, heads.size))
        p, ds = _own_probabilities(query, grad, lse[later], delta[later], qkv, step, heads)
        d_key += _per_group(ds * query, heads).sum(2)
        d_value += _per_group(p * grad, heads).sum(2)


def shared_backward(
    d_output: Tensor, lse: Tensor, delta: Tensor, qkv: Tensor, shared: Tensor, layout: Layout, heads: Heads
) -> Tensor:
    """Gradient [T, 2Gd] of step 0's keys and values, from the queries of all steps."""
    result = torch.zeros_like(shared)
    key, value = _shared(shared, heads)
    d_key, d_value = _shared(result, heads)
    for block in _blocks(layout, heads):
        for step in range(len(qkv)):
            query, grad = qkv[step, block.slots, : heads.query_width], d_output[step, block.slots]
            q, d_out = (_grouped(x.unflatten(-1, (heads.queries, heads.size)), heads) for x in (query, grad))
            normaliser, d = (_grouped(x[step, block.slots, :, None], heads) for x in (lse, delta))
            p, ds = _probabilities(
                q, d_out, normaliser, d, key[block.keys], value[block.keys], block.future, heads.scale
            )
            d_value[block.keys] += torch.bmm(p.transpose(1, 2), d_out).transpose(0, 1)
            d_key[block.keys] += torch.bmm(ds.transpose(1, 2), q).transpose(0, 1)
    return result


def _blocks(layout: Layout, heads: Heads) -> Iterator[_Block]:
    for first, last, start in layout.query_blocks.tolist():
        rows = layout.rows[first:last]
        end = int(rows[-1]) + 1
        columns = torch.arange(start, end, device=rows.device)
        future = columns > rows.repeat_interleave(heads.queries // heads.keys)[:, None]
        yield _Block(slice(first, last), slice(start, end), future)


def _probabilities(
    q: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, key: Tensor, value: Tensor, future: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """p and ds [G, r * N/G, L] of one block of queries [G, r * N/G, d] and its keys [L, G, d]."""
    scores = torch.bmm(q, key.permute(1, 2, 0)).mul_(scale).masked_fill_(future, float("-inf"))
    p = scores.sub_(lse).exp_()
    return p, torch.bmm(d_out, value.permute(1, 2, 0)).sub_(delta).mul_(p).mul_(scale)


def _own_probabilities(
    query: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, qkv: Tensor, m: int, heads: Heads
) -> tuple[Tensor, Tensor]:
    """p and ds [R, N, 1] of each query [R, N, d] and its row's own key of step m."""
    p = torch.exp(_own_scores(query, qkv, m, heads) - lse)
    dp = (_per_group(grad, heads) * _own(qkv, m, heads)[1][:, :, None]).sum(-1).flatten(1)
    return p[..., None], (p * (dp - delta) * heads.scale)[..., None]


def _own_scores(query: Tensor, qkv: Tensor, m: int, heads: Heads) -> Tensor:
    """[R, N]: scalar product of each query with its row's own key of step m."""
    return (_per_group(query, heads) * _own(qkv, m, heads)[0][:, :, None]).sum(-1).flatten(1).mul_(heads.scale)


def _own(qkv: Tensor, m: int, heads: Heads) -> tuple[Tensor, Tensor]:
    """Own keys and values of step m, [R, G, d] each."""
    return _shared(qkv[m, :, heads.query_width :], heads)


def _shared(kv: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """[n, 2Gd] -> keys and values [n, G, d]."""
    key, value = (part.unflatten(-1, (heads.keys, heads.size)) for part in kv.chunk(2, dim=-1))
    return key, value


def _per_group(x: Tensor, heads: Heads) -> Tensor:
    """[R, N, .] -> [R, G, N/G, .], a view."""
    return x.unflatten(1, (heads.keys, -1))


def _grouped(x: Tensor, heads: Heads) -> Tensor:
    """[r, N, .] -> [G, r * N/G, .]: the queries of each key-value head."""
    return _per_group(x, heads).transpose(0, 1).flatten(1, 2)


def _ungrouped(x: Tensor, heads: Heads) -> Tensor:
    """[G, r * N/G, .] -> [r, N, .]."""
    return x.unflatten(1, (-1, heads.queries // heads.keys)).transpose(0, 1).flatten(1, 2)
