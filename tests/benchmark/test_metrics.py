"""Metrics of hand-counted requests."""

from __future__ import annotations

import pytest

from eagle3x.benchmark.metrics import acceptance, by_category, tau
from eagle3x.types import EagleError, SpecCounters

# Request a: 10 verify steps, 5 accepted at position 1, 2 at 2, 1 at 3: A = 8, tau = 1.8.
A = SpecCounters(10, 30, (5, 2, 1))
# Request b: 30 verify steps, 15, 6, 1: A = 22, tau = 1.7333.
B = SpecCounters(30, 90, (15, 6, 1))
NOTHING = SpecCounters(5, 15, (0, 0, 0))
PREFILL_ONLY = SpecCounters(0, 0, (0, 0, 0))


def test_figures_of_two_requests() -> None:
    figures = acceptance([A, B])
    assert figures.tau == pytest.approx(1 + 30 / 40)
    assert figures.tau_macro == pytest.approx((1.8 + 1 + 22 / 30) / 2)
    assert figures.survival == pytest.approx((20 / 40, 8 / 40, 2 / 40))
    assert figures.alpha == pytest.approx((0.5, 8 / 20, 2 / 8))
    assert figures.draft_efficiency == pytest.approx(30 / 120)
    assert figures.slot_use == pytest.approx(1.75 / 4)
    assert (figures.requests, figures.verify_steps, figures.drafted, figures.accepted) == (2, 40, 120, 30)


def test_tau_is_one_plus_the_sum_of_survival() -> None:
    figures = acceptance([A, B, NOTHING])
    assert figures.tau == pytest.approx(1 + sum(figures.survival))


def test_twenty_five_percent_of_four_slots_is_nothing_accepted() -> None:
    figures = acceptance([NOTHING])
    assert figures.slot_use == 0.25
    assert figures.tau == 1.0
    assert figures.alpha == (0.0, None, None)


def test_a_request_that_ended_at_its_first_token_is_left_out_of_the_macro_average() -> None:
    figures = acceptance([A, PREFILL_ONLY])
    assert figures.tau_macro == pytest.approx(1.8)
    assert figures.requests == 2


@pytest.mark.parametrize("counters", [[], [PREFILL_ONLY]])
def test_no_verify_step_is_an_error(counters: list[SpecCounters]) -> None:
    with pytest.raises(EagleError, match="no acceptance length"):
        acceptance(counters)


def test_categories_are_apart() -> None:
    figures = by_category([A, B, NOTHING, PREFILL_ONLY], ["code", "math", "code", "empty"])
    assert list(figures) == ["code", "math"]
    assert figures["code"].tau == pytest.approx(1 + 8 / 15)
    assert figures["math"].tau == pytest.approx(tau(B))
