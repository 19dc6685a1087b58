"""Degenerate tails: greedy outputs that end in a loop, where a drafter is right for the wrong reason."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 32
REPEATS = 3
"""A loop has gone round at least this often..."""
SHORTEST_TAIL = 12
"""...and is at least this long: a rule of dashes or a refrain is no loop."""


def degenerate_from(token_ids: Sequence[int]) -> int | None:
    """The token from which on the output only repeats itself; None if it does not end in a loop.

    A tail with period p is a longest suffix whose tokens equal the token p before them; the first round belongs to it.
    Of all periods the one with the longest tail is taken. Give the output without its stop token.
    """
    n = len(token_ids)
    start = None
    for period in range(1, min(LONGEST_PERIOD, n // REPEATS) + 1):
        first = n
        while first > period and token_ids[first - 1] == token_ids[first - 1 - period]:
            first -= 1
        tail_start = first - period
        if n - tail_start >= max(REPEATS * period, SHORTEST_TAIL) and (start is None or tail_start < start):
            start = tail_start
    return start
