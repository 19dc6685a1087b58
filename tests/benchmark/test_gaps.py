"""Gaps between independent groups of prompts, against Welch's t-test and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3x.benchmark.bootstrap import Array, Bootstrap, student_quantile
from eagle3x.benchmark.gaps import gap, gap_tau
from eagle3x.types import EagleError, SpecCounters

BOOT = Bootstrap(20_000, 0.95, 3)


def mean(sums: Array) -> Array:
    return sums[..., 0] / sums[..., 1]


def normal(seed: int, centre: float, spread: float, size: int) -> Array:
    values = np.random.default_rng(seed).normal(centre, spread, size)
    return np.stack([values, np.ones(size)], axis=1)


def flat(verify: int, *accepted: int) -> SpecCounters:
    return SpecCounters(verify, verify * len(accepted), accepted)


def test_of_means_it_is_welchs_interval() -> None:
    a, b = normal(0, 3.0, 1.0, 15), normal(1, 2.0, 3.0, 60)
    found = gap(a, b, mean, BOOT)
    errors = [g[:, 0].var(ddof=1) / len(g) for g in (a, b)]
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / 14 + errors[1] ** 2 / 59)
    half = student_quantile(0.975, freedom) * np.sqrt(sum(errors))
    centre = a[:, 0].mean() - b[:, 0].mean()
    assert found.difference.value == pytest.approx(centre)
    assert (found.difference.low, found.difference.high) == pytest.approx((centre - half, centre + half), abs=0.08)


def test_tau_of_both_groups_by_hand() -> None:
    train, held_out = [flat(10, 8, 4), flat(20, 12, 6)], [flat(10, 2, 0), flat(10, 4, 1), flat(20, 6, 2)]
    found = gap_tau(train, ["a", "b"], held_out, ["c", "d", "e"], BOOT)
    assert found.difference.value == pytest.approx(30 / 30 - 15 / 40)
    assert found.prompts == 5


def test_two_samples_of_one_process_show_nothing_and_two_processes_do() -> None:
    same = gap(normal(2, 0, 1, 40), normal(3, 0, 1, 40), mean, BOOT)
    assert same.verdict.startswith("no difference shown")
    other = gap(normal(2, 1, 1, 40), normal(3, 0, 1, 40), mean, BOOT)
    assert other.difference.low > 0
    assert other.p_value < 0.01


def test_the_groups_are_drawn_independently() -> None:
    # The same rows in both: the value is 0, and a difference drawn with one set of weights would be 0 everywhere.
    rows = normal(5, 0, 1, 30)
    found = gap(rows, rows, mean, BOOT)
    assert found.difference.half_width == pytest.approx(2.0 * np.sqrt(2 / 30) * rows[:, 0].std(), rel=0.1)


def test_each_group_needs_two_prompts() -> None:
    with pytest.raises(EagleError, match="at least 2 prompts, not 1"):
        gap_tau([flat(9, 3)] * 3, ["a", "b", "c"], [flat(9, 3)], ["d"], BOOT)


def test_no_verify_step_in_a_group_is_an_error() -> None:
    with pytest.raises(EagleError, match="undefined"):
        gap_tau([flat(9, 3)] * 3, ["a", "b", "c"], [flat(0, 0)] * 2, ["d", "e"], BOOT)
