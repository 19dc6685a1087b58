"""Soft cross-entropy against the target's distribution over the draft vocabulary, for kept rows only, in chunks.

A label position j teaches up to K rows (row j-1-k of step k), so the target's head meets it once. Within a chunk the
gradient of the logits, softmax(z) - p, is turned into gradients of states and head at once: no tensor over a
vocabulary outlives its chunk.

T tokens, R rows asked of the drafter, K TTT steps, H hidden size, D draft vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3x.types import LastNorm


@dataclass(frozen=True)
class Teacher:
    """The target's head on last hidden states. head: [D, H] or [V, H]; final_norm: [H]."""

    head: Tensor
    final_norm: Tensor
    eps: float
    last_norm: LastNorm

    def logits(self, last: Tensor) -> Tensor:
        """[C, H] -> [C, D]: head(norm(last)); the norm is left out where the states come after it."""
        if self.last_norm == "pre_norm":
            last = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + self.eps) * self.final_norm
        return last @ self.head.T

    def argmax(self, last: Tensor, chunk: int) -> Tensor:
        """[T, H] -> [T]: the most likely id of this head's vocabulary, in chunks of rows."""
        if last.shape[0] == 0:
            return torch.zeros(0, dtype=torch.int64, device=last.device)
        return torch.cat([self.logits(part).argmax(-1) for part in last.split(chunk)])


@dataclass(frozen=True)
class StepStats:
    """Of each TTT step: mean cross-entropy, share of rows whose argmax is the target's, and how many rows. [K] each."""

    loss: Tensor
    accuracy: Tensor
    rows: Tensor


def ttt_loss(
    states: Sequence[Tensor],
    head: Tensor,
    rows: Tensor,
    keep: Tensor,
    last: Tensor,
    teacher: Teacher,
    step_weights: Sequence[float],
    chunk: int,
) -> tuple[Tensor, StepStats]:
    """Weighted mean over steps of the mean soft cross-entropy of a step's kept rows.

    states: K tensors [R, H], normed, of the rows [R]. head: [D, H]. keep: [K, T]. last: [T, H]. step_weights: K.
    Row i of step k is taught by position i+1+k. Steps without a kept row weigh nothing.
    """
    kept = [torch.nonzero(keep[step, rows])[:, 0] for step in range(len(states))]
    labels = [rows[index] + 1 + step for step, index in enumerate(kept)]
    weights = [w if len(index) else 0.0 for w, index in zip(step_weights, kept, strict=True)]
    total = sum(weights)
    if total == 0:
        raise ValueError("no row of this batch is in the loss")
    scales = [w / total / max(1, len(index)) for w, index in zip(weights, kept, strict=True)]
    loss, sums = _Chunked.apply(torch.stack(list(states)), head, kept, labels, last, teacher, scales, chunk)  # type: ignore[misc]
    counts = torch.tensor([len(index) for index in kept], device=head.device)
    present = counts.clamp(min=1)
    return loss, StepStats(sums[0] / present, sums[1] / present, counts)


class _Chunked(torch.autograd.Function):
    """Sum over steps of scale_k * sum of cross-entropies, and per step the sums of losses and of right argmaxes."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, kept: list[Tensor], labels: list[Tensor], last: Tensor,
        teacher: Teacher, scales: list[float], chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        d_states, d_head = torch.zeros_like(states), torch.zeros_like(head)
        sums = head.new_zeros(2, len(kept))
        for positions in torch.cat(labels).unique().split(chunk):
            target = torch.softmax(teacher.logits(last[positions]), dim=-1)
            best = target.argmax(-1)
            for step, (index, label) in enumerate(zip(kept, labels, strict=True)):
                low, high = torch.searchsorted(label, positions[[0, -1]] + torch.tensor([0, 1], device=label.device))
                here = index[low:high]
                if len(here) == 0:
                    continue
                among = torch.searchsorted(positions, label[low:high])
                x = states[step, here]
                z = x @ head.T
                lse = torch.logsumexp(z, dim=-1, keepdim=True)
                p = target[among]
                sums[0, step] += (lse[:, 0] - (p * z).sum(-1)).sum()
                sums[1, step] += (z.argmax(-1) == best[among]).sum()
                gradient = torch.exp(z - lse).sub_(p).mul_(scales[step])
                d_states[step, here] = gradient @ head
                if ctx.needs_input_grad[1]:
                    d_head.addmm_(gradient.T, x)
        ctx.save_for_backward(d_states, d_head)
        loss = (sums[0] * torch.tensor(scales, dtype=head.dtype, device=head.device)).sum()
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_head = ctx.saved_tensors
        scale = grads[0]
        return (d_states * scale, d_head * scale if ctx.needs_input_grad[1] else None, *(None,) * 6)
