"""Outputs with and without the drafter, by hand."""

from __future__ import annotations

import pytest

from eagle3x.benchmark.outputs import compare_outputs
from eagle3x.types import Completion, EagleError, Timing

NEAR = 1e-4


def answer(name: str, tokens: tuple[int, ...], gaps: tuple[float, ...] | None = None) -> Completion:
    return Completion(name, tokens, "length", Timing(0, 1, 2), top2_gaps=gaps)


def test_equal_outputs() -> None:
    found = compare_outputs([answer("a", (1, 2)), answer("b", (3,))], [answer("b", (3,)), answer("a", (1, 2))], NEAR)
    assert (found.requests, found.rate, found.differences) == (2, 1.0, ())


def test_a_difference_is_listed_with_its_place_and_gap() -> None:
    baseline = [answer("a", (1, 2, 3, 4), (1.0, 2.0, 5e-5, 3.0)), answer("b", (5, 6))]
    found = compare_outputs(baseline, [answer("a", (1, 2, 9, 8)), answer("b", (5, 6))], NEAR)
    assert found.rate == 0.5
    (one,) = found.differences
    assert (one.id, one.position, one.baseline_token, one.drafter_token, one.top2_gap) == ("a", 2, 3, 9, 5e-5)
    assert one.near_tie
    assert not one.lossy
    assert found.lossy == ()


def test_a_clear_choice_that_changed_is_lossy() -> None:
    found = compare_outputs([answer("a", (1, 2), (1.0, NEAR))], [answer("a", (1, 3))], NEAR)
    assert [d.id for d in found.lossy] == ["a"]
    assert not found.differences[0].near_tie


def test_an_output_that_ends_early_parts_at_its_end() -> None:
    found = compare_outputs([answer("a", (1, 2, 3), (1.0, 1.0, 0.5))], [answer("a", (1, 2))], NEAR)
    (one,) = found.differences
    assert (one.position, one.baseline_token, one.drafter_token, one.top2_gap) == (2, 3, None, 0.5)
    assert one.lossy


def test_without_gaps_nothing_is_claimed() -> None:
    found = compare_outputs([answer("a", (1,))], [answer("a", (2,))], NEAR)
    (one,) = found.differences
    assert (one.top2_gap, one.near_tie, one.lossy) == (None, False, False)


def test_the_drafters_gap_stands_in_where_the_baseline_has_none() -> None:
    found = compare_outputs([answer("a", (1, 2))], [answer("a", (1, 3), (1.0, 2e-5))], NEAR)
    assert found.differences[0].near_tie


@pytest.mark.parametrize("drafter", [[answer("b", (1,))], [answer("a", (1,)), answer("b", (1,))]])
def test_other_requests_are_no_comparison(drafter: list[Completion]) -> None:
    with pytest.raises(EagleError, match="not of the same requests"):
        compare_outputs([answer("a", (1,))], drafter, NEAR)
