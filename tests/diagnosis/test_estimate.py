"""Speed-ups by hand."""

from __future__ import annotations

import json
from math import exp, hypot, log

import pytest

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.diagnosis.estimate import StepCosts, costs_of_times, estimate, measured_cost, taus_of_survival


def exact(value: float) -> Interval:
    return Interval(value, value, value)


def test_by_hand() -> None:
    # tau 1.6, 1.9, 2.0; a step costs 1.2 + 0.1 k plain ones.
    found = estimate(taus_of_survival([0.6, 0.3, 0.1]), [costs_of_times(4, 10.0, 12.0, 1.0, longest=3)])
    assert [row.tau.value for row in found.rows] == pytest.approx([1.6, 1.9, 2.0])
    assert [row.step_cost.value for row in found.rows] == pytest.approx([1.3, 1.4, 1.5])
    assert [row.speedup.value for row in found.rows] == pytest.approx([1.6 / 1.3, 1.9 / 1.4, 2.0 / 1.5])
    assert {row.pays for row in found.rows} == {"yes"}
    assert found.best == {4: 2}


def test_a_measured_cost_is_tau_by_speed_up_and_turns_its_interval_round() -> None:
    cost = measured_cost(1.4, Interval(0.875, 0.7, 1.0))
    assert (cost.value, cost.low, cost.high) == pytest.approx((1.6, 1.4, 2.0))


def test_costs_between_and_beyond_the_measured_lengths_are_on_straight_lines_from_a_plain_step() -> None:
    one = StepCosts(1, ((3, Interval(1.6, 1.3, 1.9)),), "x")
    # From (0, 1) to (3, 1.6): 0.2 a draft, with ends of 0.1 and 0.3.
    assert [one.at(k).value for k in (1, 2, 3, 5)] == pytest.approx([1.2, 1.4, 1.6, 2.0])
    assert (one.at(5).low, one.at(5).high) == pytest.approx((1.5, 2.5))
    two = StepCosts(1, ((1, exact(1.3)), (3, exact(1.5))), "x")
    assert [two.at(k).value for k in (1, 2, 3, 4)] == pytest.approx([1.3, 1.4, 1.5, 1.6])
    assert [two.measured(k) for k in (1, 2, 3)] == [True, False, True]


def test_both_intervals_join_on_a_log_scale() -> None:
    taus = {2: Interval(1.8, 1.6, 2.0)}
    (row,) = estimate(taus, [StepCosts(1, ((2, Interval(1.2, 1.0, 1.5)),), "x")]).rows
    assert row.speedup.value == pytest.approx(1.5)
    assert row.speedup.low == pytest.approx(1.5 * exp(-hypot(log(1.8 / 1.6), log(1.5 / 1.2))))
    assert row.speedup.high == pytest.approx(1.5 * exp(hypot(log(2.0 / 1.8), log(1.2 / 1.0))))


@pytest.mark.parametrize(
    ("tau", "cost", "pays"),
    [
        (Interval(1.8, 1.7, 1.9), exact(1.5), "yes"),
        (Interval(1.8, 1.7, 1.9), exact(1.8), "cannot tell"),
        (Interval(1.8, 1.7, 1.9), exact(2.0), "no"),
        (Interval(1.8, 1.7, 1.9), exact(3.2), "never"),  # a step of 2 drafts yields 3 tokens at most
    ],
)
def test_what_pays(tau: Interval, cost: Interval, pays: str) -> None:
    (row,) = estimate({2: tau}, [StepCosts(1, ((2, cost),), "x")]).rows
    assert row.pays == pays


def test_no_drafts_at_all_may_be_best() -> None:
    costs = [costs_of_times(32, 10.0, 20.0, 1.0, 2), costs_of_times(1, 10.0, 10.0, 1.0, 2)]
    found = estimate(taus_of_survival([0.5, 0.2]), costs)
    assert found.best == {1: 2, 32: None}  # batch 1: 1.5 / 1.1 and 1.7 / 1.2; batch 32: 1.5 / 2.1 and 1.7 / 2.2
    assert [(row.batch, row.num_speculative_tokens) for row in found.rows] == [(1, 1), (1, 2), (32, 1), (32, 2)]
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["best"] == {"1": 2, "32": None}


@pytest.mark.parametrize("survival", [[], [1.2], [0.3, 0.4], [-0.1]])
def test_what_is_no_survival(survival: list[float]) -> None:
    with pytest.raises(ValueError, match="do not rise with the position"):
        taus_of_survival(survival)


def test_what_are_no_costs() -> None:
    with pytest.raises(ValueError, match="ascending"):
        StepCosts(1, ((3, exact(1.5)), (1, exact(1.2))), "x")
    with pytest.raises(ValueError, match="less than nothing"):
        StepCosts(1, ((1, exact(0.0)),), "x")
