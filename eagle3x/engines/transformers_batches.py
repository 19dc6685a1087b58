"""Which sequences are computed together, and how they are padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_BATCH_TOKENS = 4096
"""Padded tokens of one prefill or capture forward: beyond this, a larger batch is no faster and only takes memory."""
MIN_FILL = 0.85
"""The shortest sequence of a batch has at least this share of the longest one's tokens."""


def by_length(lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """Cut the indices of `lengths`, longest first, into batches of similar length."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches:
            longest = lengths[batches[-1][0]]
            room = len(batches[-1]) < max_rows and (len(batches[-1]) + 1) * longest <= MAX_BATCH_TOKENS
            if room and lengths[index] >= MIN_FILL * longest:
                batches[-1].append(index)
                continue
        batches.append([index])
    return batches


def right_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, T] token ids, padded with token 0 on the right: causal attention never sees what stands there."""
    longest = max(len(s) for s in sequences)
    padded = [[*s, *[0] * (longest - len(s))] for s in sequences]
    return torch.tensor(padded, dtype=torch.long, device=device)
