"""Loops at the end of hand-made outputs."""

from __future__ import annotations

import pytest

from eagle3x.benchmark.degenerate import degenerate_from

PROSE = list(range(100, 130))


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        (PROSE, None),
        ([], None),
        ([5], None),
        # One token for ever, from 30 on.
        (PROSE + [7] * 12, 30),
        # Eleven of them are no loop yet.
        (PROSE + [7] * 11, None),
        # Two tokens, six rounds.
        (PROSE + [1, 2] * 6, 30),
        # A sentence of ten tokens three times; two times is a refrain.
        (PROSE + list(range(10)) * 3, 30),
        (PROSE + list(range(10)) * 2, None),
        # The last round may be cut by the length limit.
        (PROSE + list(range(10)) * 3 + [0, 1, 2], 30),
        # A loop that the output left again is no degenerate tail.
        ([7] * 20 + PROSE, None),
        # Periods longer than 32 are not looked for.
        (list(range(33)) * 4, None),
        (list(range(32)) * 3, 0),
        # A counter changes in every round: no exact loop.
        ([x for i in range(9) for x in (1, 2, 200 + i, 3)], None),
        # A loop within a loop: the longest tail is taken. aab aab aab aab aab
        ([*PROSE, *[4, 4, 9] * 5], 30),
        # Every round of 14 ends in a shorter loop: still the longest tail.
        (([1, 2] + [7] * 12) * 3, 0),
        # The text before happens to fit the loop's last token: the tail begins with it.
        ([*PROSE, 2, *[1, 2] * 6], 30),
    ],
)
def test_where_the_tail_begins(tokens: list[int], start: int | None) -> None:
    assert degenerate_from(tokens) == start
