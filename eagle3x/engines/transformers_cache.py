"""A key-value cache for transformers in which the slot of a token is its position.

Rejected drafts need no clean-up: the next tokens of the row are written over them, and until then no query looks
that far, because a query at position q attends to slots <= q. Rows of one batch may stand at different positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


class SlotCache(Cache):
    """Keys and values of `rows` sequences with `slots` positions each, per layer [rows, slots, heads, head_dim]."""

    def __init__(self, num_layers: int, rows: int, slots: int) -> None:
        super().__init__(layers=[])
        self.rows, self.slots = rows, slots
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._first = self._count = 0
        self._length: int | None = None
        self._flat = torch.empty(0, dtype=torch.long)

    def aim(self, first_row: int, positions_BT: Tensor, length: int | None) -> None:
        """Say what the next forward writes: rows from `first_row` on, at `positions_BT` [B, T].

        `length`: slots that attention reads. None: a prefill from position 0, whose own keys are all there is.
        """
        count = positions_BT.shape[0]
        rows_B = torch.arange(first_row, first_row + count, device=positions_BT.device)
        self._first, self._count, self._length = first_row, count, length
        self._flat = (rows_B[:, None] * self.slots + positions_BT).flatten()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, T, head_dim] where `aim` said; return what attention reads, [B, heads, slots, head_dim]."""
        keys = self._write(self._keys, layer_idx, key_states)
        values = self._write(self._values, layer_idx, value_states)
        if self._length is None:
            return key_states, value_states
        rows = slice(self._first, self._first + self._count)
        return keys[rows, : self._length].transpose(1, 2), values[rows, : self._length].transpose(1, 2)

    def _write(self, layers: list[Tensor | None], layer: int, states: Tensor) -> Tensor:
        stored = layers[layer]
        _, heads, _, head_dim = states.shape
        if stored is None:
            # Zeros, not garbage: a masked slot that holds a NaN would still spoil the weighted sum of values.
            stored = layers[layer] = states.new_zeros(self.rows, self.slots, heads, head_dim)
        flat = stored.view(self.rows * self.slots, heads, head_dim)
        flat.index_copy_(0, self._flat, states.transpose(1, 2).reshape(-1, heads, head_dim))
        return stored

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `destination`."""
        for layers in (self._keys, self._values):
            for stored in layers:
                if stored is not None:
                    stored[destination, :length] = stored[source, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions and masks are always given explicitly."""
        return 0
