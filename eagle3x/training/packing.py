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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3x.drafters.losses import Pairs, pairs_of
from eagle3x.kernels.layout import KEY_BLOCK, QUERY_BLOCK, Layout, layout_of


class Empty(Protocol):
    """Where packed steps are written to."""

    def __call__(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> Tensor:
        """As `torch.empty`."""
        ...


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
class Size:
    """Of a whole training step: tokens, rows that are in the loss at any TTT step, and rows in the loss of each."""

    tokens: int
    asked: int
    kept: tuple[int, ...]

    @classmethod
    def of(cls, keep: Tensor) -> Size:
        """keep [K, T]: see `kept`."""
        return cls(keep.shape[1], int(keep.any(dim=0).sum()), tuple(keep.sum(1).tolist()))


@dataclass(frozen=True)
class Packed:
    """Documents side by side. token_ids [T], aux [T, A*H], last [L, H]: states of the positions that teach.

    layout: the rows that are in the loss at any step. pairs: each of them and its label, step by step. step: the whole
    step, of which this is all, or one process' share. times: what loss and gradients are multiplied by, so that their
    mean over all processes is the step's.
    """

    token_ids: Tensor
    aux: Tensor
    last: Tensor
    layout: Layout
    pairs: Pairs
    step: Size
    times: int

    def map(self, change: Callable[[Tensor], Any]) -> Packed:
        """The same with every tensor changed: moved, described."""
        ids, aux, last = change(self.token_ids), change(self.aux), change(self.last)
        return Packed(ids, aux, last, self.layout.map(change), self.pairs.map(change), self.step, self.times)

    def to(self, device: torch.device) -> Packed:
        """The same on another device."""
        return self.map(lambda x: x.to(device))


def keep_rows(loss_mask: Tensor, steps: int) -> Tensor:
    """[T] of one document -> [K, T]: whether row i of step k is in the loss (see the drawing above)."""
    length = loss_mask.shape[0]
    keep = torch.zeros(steps, length, dtype=torch.bool)
    for step in range(min(steps, max(0, length - 2))):
        keep[step, : length - 2 - step] = loss_mask[2 + step :]
    return keep


def kept(documents: Sequence[Document], steps: int, teachable: Sequence[Tensor] | None = None) -> Tensor:
    """[K, T] of documents side by side: row i of step k is in the loss.

    teachable: for each document [T], whether the distribution at a position may teach (see `train.out_of_vocab`).
    """
    keep = []
    for index, document in enumerate(documents):
        rows = keep_rows(document.loss_mask, steps)
        if teachable is not None:
            for step in range(steps):
                rows[step, : -1 - step] &= teachable[index][1 + step :]
        keep.append(rows)
    return torch.cat(keep, dim=1)


def pack(
    documents: Sequence[Document], keep: Tensor, step_weights: Sequence[float], chunk: int, empty: Empty = torch.empty,
    step: Size | None = None, times: int = 1,
) -> Packed:  # fmt: skip
    """Join documents; no row looks across their borders.

    keep: see `kept`. step_weights, one for each TTT step, and chunk: see `pairs_of`. empty: hands out the memory of
    every tensor. step (None: these documents), times: see `Packed`.
    """
    step = step or Size.of(keep)
    rows = torch.nonzero(keep.any(dim=0))[:, 0]
    layout = layout_of(rows, [len(d.token_ids) for d in documents])
    pairs = pairs_of(keep, layout.slots, step_weights, chunk, step.kept, times)

    def place(x: Tensor) -> Tensor:
        return empty(tuple(x.shape), dtype=x.dtype).copy_(x)

    tokens, aux, last = ([getattr(d, name) for d in documents] for name in ("token_ids", "aux", "last"))
    return Packed(
        _joined(tokens, empty), _joined(aux, empty), _chosen(last, pairs.labels, empty),
        layout.map(place), pairs.map(place), step, times,
    )  # fmt: skip


def room(document: Document, tokens: int, documents: int, steps: int) -> int:
    """Bytes that `pack` asks of `empty` at most, for so many tokens in documents such as this one: every row kept."""
    states = sum(x.shape[1] * x.element_size() for x in (document.aux, document.last))
    indices = 8 + (8 + 4 + 4) + 8 + 4 * 8 * steps  # token ids; rows, slots, positions; labels; row, label, step, scale
    blocks = (tokens // min(QUERY_BLOCK, KEY_BLOCK) + documents) * 4 * (3 + 4)
    return tokens * (states + indices) + blocks


def _joined(parts: Sequence[Tensor], empty: Empty) -> Tensor:
    """One copy, from the mapped file to where it is sent from."""
    out = empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype)
    return torch.cat(list(parts), out=out)


def _chosen(parts: Sequence[Tensor], rows: Tensor, empty: Empty) -> Tensor:
    """Ascending rows [n] of tensors that lie one after another, and only these are read."""
    out = empty((len(rows), *parts[0].shape[1:]), dtype=parts[0].dtype)
    ends = torch.tensor([len(part) for part in parts]).cumsum(0)
    start = first = 0
    for part, end, last in zip(parts, ends.tolist(), torch.searchsorted(rows, ends).tolist(), strict=True):
        torch.index_select(part, 0, rows[first:last] - start, out=out[first:last])
        start, first = end, last
    return out


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


def shares(lengths: Sequence[int], processes: int) -> list[list[int]]:
    """A step's documents dealt to as many processes: the longest first, each to the one with fewest tokens so far."""
    dealt: list[list[int]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = tokens.index(min(tokens))
        dealt[least].append(index)
        tokens[least] += lengths[index]
    return [sorted(part) for part in dealt]
