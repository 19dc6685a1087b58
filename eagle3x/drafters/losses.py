"""Losses against the target's distribution over the draft vocabulary, for kept rows only, in chunks.

A label position j teaches up to K rows (row j-1-k of step k), so the target's head meets it once. Within a chunk the
gradient of the logits (of soft cross-entropy: softmax(z) - p) is turned into gradients of states and head at once: no
tensor over a vocabulary outlives its chunk.

T tokens, R rows asked of the drafter, K TTT steps, P kept pairs of row and step, L labels that teach one, H hidden
size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3x.kernels import kernels_for
from eagle3x.kernels.acceptance import log_acceptance_, total_variation_
from eagle3x.kernels.products import add_weight_gradient, folded, unfolded, weight_gradient, wide_product
from eagle3x.training.config import Loss
from eagle3x.types import LastNorm


@dataclass(frozen=True)
class Teacher:
    """The target's head on last hidden states. head: [D, H] or [V, H]; final_norm: [H]."""

    head: Tensor
    final_norm: Tensor
    eps: float
    last_norm: LastNorm

    def logits(self, last: Tensor) -> Tensor:
        """[C, H] -> [C, D], float32 at least: head(norm(last)); no norm where the states come after it."""
        if self.last_norm == "pre_norm":
            last = last.to(self.final_norm.dtype)
            last = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + self.eps) * self.final_norm
        return wide_product(last.to(self.head.dtype), self.head)

    def argmax(self, last: Tensor, chunk: int) -> Tensor:
        """[T, H] -> [T]: the most likely id of this head's vocabulary, in chunks of rows."""
        if last.shape[0] == 0:
            return torch.zeros(0, dtype=torch.int64, device=last.device)
        return torch.cat([self.logits(part).argmax(-1) for part in last.split(chunk)])


@dataclass(frozen=True)
class Pairs:
    """The kept pairs of a row and a step, by the label that teaches them.

    row [P]: step * R + slot. label [P]: which of the L labels; ascending. step [P]. scale [P]: weight in the loss.
    labels [L]: positions among T. chunks: ends of labels and of pairs that meet a head together.
    """

    row: Tensor
    label: Tensor
    step: Tensor
    scale: Tensor
    labels: Tensor
    chunks: tuple[tuple[int, int], ...]

    def map(self, change: Callable[[Tensor], Any]) -> Pairs:
        """The same with every tensor changed: moved, described."""
        row, label, step, scale = change(self.row), change(self.label), change(self.step), change(self.scale)
        return Pairs(row, label, step, scale, change(self.labels), self.chunks)


def pairs_of(
    keep: Tensor, slots: Tensor, step_weights: Sequence[float], chunk: int, counts: Sequence[int] | None = None,
    times: int = 1,
) -> Pairs:  # fmt: skip
    """keep [K, T]: row i of step k is in the loss, taught by position i+1+k. slots [T]: of the rows asked for.

    The loss is the mean over steps, weighted by step_weights [K], of the mean over a step's pairs; steps without a pair
    weigh nothing. chunk: about how many pairs meet a head together: whole labels, and at least one. counts [K]: a
    step's pairs where other processes have some too; theirs are missing from the sum, which is taken `times`.
    ValueError if there is no pair here.
    """
    counts = keep.sum(1).tolist() if counts is None else counts
    weights = [w if count else 0.0 for w, count in zip(step_weights, counts, strict=True)]
    if sum(weights) == 0 or not keep.any():
        raise ValueError("no row of this batch is in the loss")
    scales = torch.tensor(
        [times * w / sum(weights) / max(1, count) for w, count in zip(weights, counts, strict=True)],
        dtype=torch.float64,
    )
    steps, total = keep.shape
    taught = torch.zeros(total + steps, steps, dtype=torch.bool)  # whether a position teaches a row of each step
    for step, rows in enumerate(keep):
        taught[1 + step : 1 + step + total, step] = rows
    position, step = torch.nonzero(taught, as_tuple=True)
    row = position - 1 - step
    labels, per_label = torch.unique_consecutive(position, return_counts=True)
    label = torch.arange(len(labels)).repeat_interleave(per_label)
    ends = per_label.cumsum(0)
    chunks, done = [], 0
    while done < len(labels):
        start = int(ends[done - 1]) if done else 0
        done = max(done + 1, int(torch.searchsorted(ends, start + chunk, right=True)))
        chunks.append((done, int(ends[done - 1])))
    rows = int((slots >= 0).sum())
    return Pairs(step * rows + slots[row], label, step, scales[step], labels, tuple(chunks))


def ttt_loss(
    states: Tensor, head: Tensor, norm: Tensor, pairs: Pairs, last: Tensor, teacher: Teacher, loss: Loss
) -> tuple[Tensor, Tensor]:
    """The loss, and sums [2, K] over each step's pairs: of their losses, and of argmaxes that are the target's.

    states [K, R, H]: of root mean square 1. head [D, H] reads them times norm [H]; neither learns unless it requires a
    gradient. last [L, H]: the labels' states.
    """
    return _Chunked.apply(states, head, norm, pairs, last, teacher, loss)  # type: ignore[return-value]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, norm: Tensor, pairs: Pairs, last: Tensor, teacher: Teacher, name: Loss
    ) -> tuple[Tensor, Tensor]:
        kernels = kernels_for(states)
        loss_ = {
            "cross_entropy": kernels.soft_cross_entropy_,
            "total_variation": total_variation_,
            "lk": log_acceptance_,
        }[name]
        rows = states.flatten(0, 1)
        d_states = torch.zeros_like(rows)
        d_head = torch.empty_like(head) if ctx.needs_input_grad[1] else None
        matrix = folded([head], norm, states)
        losses, rights = [], []
        labels_done = pairs_done = 0
        for labels_end, pairs_end in pairs.chunks:
            here = slice(pairs_done, pairs_end)
            p, best = kernels.softmax(teacher.logits(last[labels_done:labels_end]), states.dtype)
            x = rows.index_select(0, pairs.row[here])
            z = x @ matrix.T
            loss, right = loss_(z, p, best, pairs.label[here] - labels_done, pairs.scale[here])
            losses.append(loss)
            rights.append(right)
            d_states.index_copy_(0, pairs.row[here], z @ matrix)
            if d_head is not None:
                (add_weight_gradient if pairs_done else weight_gradient)(z, x, d_head)
            labels_done, pairs_done = labels_end, pairs_end
        d_norm = None if d_head is None else unfolded(d_head, [head], norm, states)
        ctx.gradients = d_states.view_as(states), d_head, d_norm
        loss = torch.cat(losses)
        sums = loss.new_zeros(2, len(states))
        sums.index_add_(1, pairs.step, torch.stack([loss, torch.cat(rights).to(loss.dtype)]))
        ctx.mark_non_differentiable(sums)
        return (loss * pairs.scale).sum().to(loss.dtype), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if gradient is None else gradient.mul_(grads[0]) for gradient in ctx.gradients]
        del ctx.gradients
        return *gradients, None, None, None, None
