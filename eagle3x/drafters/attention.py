"""Attention of the training-time test (TTT), exact and without a T x kT mask.

At step k a query reads step 0's keys of its document, causally, and its own row's keys of steps 1..k. The first part
gives an output o and a log-sum-exp l; the k own scores s_m are scalar products, and both parts merge under one
normaliser:  L = logaddexp(l, s_1..s_k),  O = exp(l - L) o + sum_m exp(s_m - L) v_m.

Given O and L, the backward of each part is that of plain attention with the merged normaliser (FlashAttention-2,
Dao 2023, section 3.1: ds = p (dp - rowsum(dO * O))). So nothing of size queries x keys is kept, and no more than
`QUERY_CHUNK` rows of it exist at a time.

T rows of step 0, R queried rows, M own keys, N query heads, G key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY_CHUNK = 512


@dataclass(frozen=True)
class Segment:
    """Queries `rows` (a slice of R) of one document, whose step-0 keys are `keys` (a slice of T)."""

    rows: slice
    keys: slice


def segments(rows: Tensor, document_lengths: Sequence[int]) -> list[Segment]:
    """Cut ascending row indices [R] at document borders and into chunks; keys end where the last query may look."""
    result: list[Segment] = []
    start = 0
    for length in document_lengths:
        first, last = torch.searchsorted(rows, torch.tensor([start, start + length], device=rows.device)).tolist()
        for low in range(first, last, QUERY_CHUNK):
            high = min(low + QUERY_CHUNK, last)
            result.append(Segment(slice(low, high), slice(start, int(rows[high - 1]) + 1)))
        start += length
    return result


def ttt_attention(
    query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor, rows: Tensor, parts: list[Segment]
) -> Tensor:
    """Attention of one TTT step.

    query: [R, N, d], rotated. key, value: [T, G, d] of step 0. own_key, own_value: [M, R, G, d] of steps 1..M.
    rows: [R], the row of each query. Returns [R, N, d].
    """
    output: Tensor = _Merged.apply(query, key, value, own_key, own_value, rows, parts)  # type: ignore[assignment]
    return output


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[R, N, d] -> [G, R * N/G, d]: the queries of each key-value head."""
    rows, heads, size = x.shape
    return x.view(rows, groups, heads // groups, size).transpose(0, 1).reshape(groups, -1, size)


def _ungrouped(x: Tensor, rows: int) -> Tensor:
    """[G, R * N/G, d] -> [R, N, d]."""
    groups, _, size = x.shape
    return x.view(groups, rows, -1, size).transpose(0, 1).reshape(rows, -1, size)


def _causal_scores(
    query: Tensor, key: Tensor, rows: Tensor, parts: list[Segment], scale: float
) -> Iterator[tuple[Segment, Tensor, Tensor]]:
    """For each segment: the grouped queries [G, r, d] and their masked scores [G, r, L]."""
    groups = key.shape[1]
    per_group = query.shape[1] // groups
    for part in parts:
        q = _grouped(query[part.rows], groups)
        scores = torch.bmm(q, key[part.keys].permute(1, 2, 0)).mul_(scale)
        columns = torch.arange(part.keys.start, part.keys.stop, device=rows.device)
        future = columns > rows[part.rows].repeat_interleave(per_group)[:, None]
        yield part, q, scores.masked_fill_(future, float("-inf"))


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        rows: Tensor,
        parts: list[Segment],
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5
        shared = torch.empty_like(query)
        shared_lse = query.new_empty(query.shape[:2])
        for part, _, scores in _causal_scores(query, key, rows, parts, scale):
            lse = torch.logsumexp(scores, dim=-1, keepdim=True)
            out = torch.bmm(torch.exp(scores - lse), value[part.keys].transpose(0, 1))
            count = part.rows.stop - part.rows.start
            shared[part.rows] = _ungrouped(out, count)
            shared_lse[part.rows] = _ungrouped(lse, count)[..., 0]
        own_scores = _own_scores(query, own_key, scale)
        lse = torch.logsumexp(torch.cat([shared_lse[None], own_scores]), dim=0)
        output = shared * torch.exp(shared_lse - lse)[..., None]
        for scores, v in zip(own_scores, own_value, strict=True):
            output += torch.exp(scores - lse)[..., None] * _to_heads(v, query)
        ctx.save_for_backward(query, key, value, own_key, own_value, rows, output, lse)
        ctx.parts = parts
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, own_key, own_value, rows, output, lse = ctx.saved_tensors
        scale, groups = query.shape[-1] ** -0.5, key.shape[1]
        delta = (grad * output).sum(-1)
        d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for part, q, scores in _causal_scores(query, key, rows, ctx.parts, scale):
            count = part.rows.stop - part.rows.start
            p = torch.exp(scores - _grouped(lse[part.rows][..., None], groups))
            d_out = _grouped(grad[part.rows], groups)
            dp = torch.bmm(d_out, value[part.keys].permute(1, 2, 0))
            ds = p * (dp - _grouped(delta[part.rows][..., None], groups)) * scale
            d_value[part.keys] += torch.bmm(p.transpose(1, 2), d_out).transpose(0, 1)
            d_key[part.keys] += torch.bmm(ds.transpose(1, 2), q).transpose(0, 1)
            d_query[part.rows] = _ungrouped(torch.bmm(ds, key[part.keys].transpose(0, 1)), count)
        d_own_key, d_own_value = torch.zeros_like(own_key), torch.zeros_like(own_value)
        for m, scores in enumerate(_own_scores(query, own_key, scale)):
            p = torch.exp(scores - lse)[..., None]
            dp = (grad * _to_heads(own_value[m], query)).sum(-1, keepdim=True)
            ds = p * (dp - delta[..., None]) * scale
            d_query += ds * _to_heads(own_key[m], query)
            d_own_key[m] = _to_groups(ds * query, groups)
            d_own_value[m] = _to_groups(p * grad, groups)
        return d_query, d_key, d_value, d_own_key, d_own_value, None, None


def _own_scores(query: Tensor, own_key: Tensor, scale: float) -> Tensor:
    """[M, R, N]: scalar product of each query with its row's own keys."""
    rows, heads, size = query.shape
    groups = own_key.shape[2]
    q = query.view(rows, groups, heads // groups, size)
    return (q * own_key[:, :, :, None]).sum(-1).mul(scale).flatten(2)


def _to_heads(x: Tensor, query: Tensor) -> Tensor:
    """[R, G, d] -> [R, N, d]: each key-value head repeated for its queries."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _to_groups(x: Tensor, groups: int) -> Tensor:
    """[R, N, d] -> [R, G, d]: the sum over the queries of each key-value head."""
    rows, heads, size = x.shape
    return x.view(rows, groups, heads // groups, size).sum(2)
