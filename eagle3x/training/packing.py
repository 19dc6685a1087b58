"""Samples side by side in one training step, and the one place where the shift between them and their labels is made.

A row is a position of a sample. Capital tokens were written by the target (their loss mask is true):

    position i         0     1     2     3     4     5
    token              a     b     C     D     E     f
    state              x0    x1    x2    x3    x4    x5

    row i              0     1     2     3     4     5
    reads state        x0    x1    x2    x3    x4    x5
    step 0: token i+1  b     C     D     E     f     .
      predicts i+2     C     D     E     f     .     .      taught by the distribution of state i+1
      in the loss      yes   yes   yes   no    no    no
    step 1: token i+2  C     D     E     f     .     .
      predicts i+3     D     E     f     .     .     .      taught by the distribution of state i+2
      in the loss      yes   yes   no    no    no    no

So row i of step k reads token i+1+k, learns the target's distribution at position i+1+k, and is in the loss if token
i+2+k exists in its document and was written by the target.

T tokens of all documents, K TTT steps, A boundaries, H hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Document(Protocol):
    """What packing reads of a sample (`eagle3x.data.shards.Sample`)."""

    @property
    def token_ids(self) -> Tensor:
        """[T]."""
        ...

    @property
    def loss_mask(self) -> Tensor:
        """[T]: written by the target."""
        ...

    @property
    def aux(self) -> Tensor:
        """[T, A*H]."""
        ...

    @property
    def last(self) -> Tensor:
        """[T, H]."""
        ...


@dataclass(frozen=True)
class Packed:
    """Documents side by side. token_ids [T], aux [T, A*H], last [T, H], keep [K, T]: row i of step k is in the loss."""

    token_ids: Tensor
    aux: Tensor
    last: Tensor
    keep: Tensor
    document_lengths: tuple[int, ...]

    def to(self, device: torch.device) -> Packed:
        """The same on another device."""
        parts = (x.to(device) for x in (self.token_ids, self.aux, self.last, self.keep))
        return Packed(*parts, document_lengths=self.document_lengths)


def keep_rows(loss_mask: Tensor, steps: int) -> Tensor:
    """[T] of one document -> [K, T]: whether row i of step k is in the loss (see the drawing above)."""
    length = loss_mask.shape[0]
    keep = torch.zeros(steps, length, dtype=torch.bool)
    for step in range(min(steps, max(0, length - 2))):
        keep[step, : length - 2 - step] = loss_mask[2 + step :]
    return keep


def pack(documents: Sequence[Document], steps: int, teachable: Sequence[Tensor] | None = None) -> Packed:
    """Join documents; no row looks across their borders.

    teachable: for each document [T], whether the distribution at a position may teach (see `train.out_of_vocab`).
    """
    keep = []
    for index, document in enumerate(documents):
        kept = keep_rows(document.loss_mask, steps)
        if teachable is not None:
            for step in range(steps):
                kept[step, : -1 - step] &= teachable[index][1 + step :]
        keep.append(kept)
    return Packed(
        token_ids=torch.cat([d.token_ids for d in documents]),
        aux=torch.cat([d.aux for d in documents]).float(),
        last=torch.cat([d.last for d in documents]).float(),
        keep=torch.cat(keep, dim=1),
        document_lengths=tuple(d.token_ids.shape[0] for d in documents),
    )


def plan(lengths: Sequence[int], tokens_per_step: int, epochs: int, seed: int) -> list[list[int]]:
    """Which samples each step reads: every sample once an epoch, in an order of its own, packed up to tokens_per_step.

    A sample that is longer than `tokens_per_step` gets a step of its own; none is ever cut.
    """
    steps: list[list[int]] = []
    for epoch in range(epochs):
        order = list(range(len(lengths)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        batch: list[int] = []
        filled = 0
        for index in order:
            if batch and filled + lengths[index] > tokens_per_step:
                steps.append(batch)
                batch, filled = [], 0
            batch.append(index)
            filled += lengths[index]
        steps.append(batch)
    return steps
