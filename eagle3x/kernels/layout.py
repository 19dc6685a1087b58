"""Which rows of packed documents are asked for, and the blocks in which attention meets them.

T rows of all documents, R rows asked for; a slot is a place among the R. Made on the CPU, where batches are packed, so
that no training step waits for the device to count something.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 128
KEY_BLOCK = 128


@dataclass(frozen=True)
class Heads:
    """N query heads that share G key-value heads of d values each."""

    queries: int
    keys: int
    size: int

    @property
    def query_width(self) -> int:
        """Values of a row's queries, N * d."""
        return self.queries * self.size

    @property
    def key_width(self) -> int:
        """Values of a row's keys, G * d."""
        return self.keys * self.size

    @property
    def width(self) -> int:
        """Values of a row's queries, keys and values side by side."""
        return self.query_width + 2 * self.key_width

    @property
    def scale(self) -> float:
        """What a scalar product is multiplied by."""
        return self.size**-0.5


@dataclass(frozen=True)
class Layout:
    """rows [R]: ascending. slots [T]: of each row, -1 where it is not asked for. positions [T]: in its document.

    query_blocks [n, 3]: slots first..last of one document, whose keys start at the third. key_blocks [m, 4]: rows
    first..last of one document, which slots third..fourth may look at. Ends are exclusive; the blocks with most work
    come first. longest: tokens of the longest document.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor
    query_blocks: Tensor
    key_blocks: Tensor
    longest: int

    def map(self, change: Callable[[Tensor], Any]) -> Layout:
        """The same with every tensor changed: moved, described."""
        rows, slots, positions = change(self.rows), change(self.slots), change(self.positions)
        return Layout(rows, slots, positions, change(self.query_blocks), change(self.key_blocks), self.longest)


def layout_of(rows: Tensor, document_lengths: Sequence[int]) -> Layout:
    """rows [R]: ascending, on the CPU. The documents lie side by side."""
    total = sum(document_lengths)
    slots = torch.full((total,), -1, dtype=torch.int32)
    slots[rows] = torch.arange(len(rows), dtype=torch.int32)
    ends = torch.tensor(document_lengths).cumsum(0)
    borders = torch.searchsorted(rows, ends).tolist()
    queries: list[tuple[int, int, int]] = []
    keys: list[tuple[int, int, int, int]] = []
    start = first = 0
    row_list = rows.tolist()
    for end, last in zip(ends.tolist(), borders, strict=True):
        queries += [(low, min(low + QUERY_BLOCK, last), start) for low in range(first, last, QUERY_BLOCK)]
        seen = row_list[last - 1] + 1 if last > first else start  # nobody looks at what comes after the last query
        slot = first
        for low in range(start, seen, KEY_BLOCK):
            slot = bisect_left(row_list, low, slot, last)
            keys.append((low, min(low + KEY_BLOCK, seen), slot, last))
        start, first = end, last
    queries.sort(key=lambda b: b[2] - row_list[b[1] - 1])
    keys.sort(key=lambda b: b[2] - b[3])
    lengths = torch.tensor(document_lengths)
    return Layout(
        rows=rows,
        slots=slots,
        positions=(torch.arange(total) - (ends - lengths).repeat_interleave(lengths)).int(),
        query_blocks=torch.tensor(queries, dtype=torch.int32).reshape(-1, 3),
        key_blocks=torch.tensor(keys, dtype=torch.int32).reshape(-1, 4),
        longest=max(document_lengths),
    )
