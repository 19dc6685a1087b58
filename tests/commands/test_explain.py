"""What printed figures mean, worked out by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from eagle3x.commands.config import ExplainArgs
from eagle3x.commands.explain import explain, run
from eagle3x.types import ConfigError


def after(lines: list[str], head: str) -> list[str]:
    """The two lines below the reading that starts with `head`."""
    at = next(i for i, line in enumerate(lines) if line.startswith(head))
    return [line.strip() for line in lines[at + 1 : at + 3]]


def test_42_percent_with_4_slots_is_tau_1_68() -> None:
    lines = explain(rate=0.42, num_draft_tokens=4)
    assert after(lines, "Read as slot use") == [
        "tau = 1.68: 0.68 of 3 drafts accepted per verify step, and the bonus token",
        "draft efficiency = 22.7%, slot use = 42.0%",
    ]
    # As draft efficiency: 1 + 0.42 x 3 = 2.26; 2.26 / 4 = 56.5 %.
    assert after(lines, "Read as draft efficiency") == [
        "tau = 2.26: 1.26 of 3 drafts accepted per verify step, and the bonus token",
        "draft efficiency = 42.0%, slot use = 56.5%",
    ]


def test_25_percent_with_4_slots_is_nothing_accepted() -> None:
    lines = explain(rate=0.25, num_draft_tokens=4)
    assert after(lines, "Read as slot use")[0] == "tau = 1.00: no draft was ever accepted"


def test_percent_and_share_are_the_same() -> None:
    assert explain(rate=42, num_draft_tokens=4) == explain(rate=0.42, num_draft_tokens=4)


def test_both_engines_lengths_are_the_same_chain() -> None:
    by_slots = explain(rate=0.5, num_draft_tokens=5)
    assert by_slots == explain(rate=0.5, num_speculative_tokens=4)
    assert by_slots == explain(rate=0.5, num_speculative_tokens=4, num_draft_tokens=5)
    assert "num_speculative_tokens=4" in by_slots[0]
    assert "num_draft_tokens=5" in by_slots[0]


def test_slot_use_below_one_slot_is_impossible_but_a_draft_efficiency() -> None:
    lines = explain(rate=0.1, num_draft_tokens=4)
    assert after(lines, "Read as slot use")[0].startswith("impossible: it would mean tau = 0.40")
    assert after(lines, "Read as draft efficiency")[0].startswith("tau = 1.30")


def test_one_third_printed_with_two_digits_is_still_one_slot_of_three() -> None:
    assert after(explain(rate=0.33, num_draft_tokens=3), "Read as slot use")[0].startswith("tau = 1.00")


def test_full_acceptance() -> None:
    lines = explain(rate=1, num_draft_tokens=4)
    assert after(lines, "Read as slot use")[0] == "tau = 4.00: every draft was accepted"
    assert after(lines, "Read as draft efficiency")[0] == "tau = 4.00: every draft was accepted"


def test_tau_to_rates() -> None:
    lines = explain(tau=1.68, num_speculative_tokens=3)
    assert lines[2] == "draft efficiency = 22.7%, slot use = 42.0%"


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"rate": 1.68, "num_draft_tokens": 4}, r"give tau=1\.68.*0\.42.*42"),
        ({"rate": 101, "num_draft_tokens": 4}, r"0\.42 or a percentage such as 42"),
        ({"rate": -0.1, "num_draft_tokens": 4}, "impossible"),
        ({"rate": 0.42}, "needs num_draft_tokens"),
        ({"num_draft_tokens": 4}, "one figure, rate or tau"),
        ({"rate": 0.4, "tau": 1.6, "num_draft_tokens": 4}, "one figure, rate or tau"),
        ({"tau": 4.5, "num_draft_tokens": 4}, "1 .* to 4 tokens"),
        ({"tau": 0.9, "num_draft_tokens": 4}, "impossible"),
        ({"rate": 0.4, "num_draft_tokens": 1}, "at least 2"),
        ({"rate": 0.4, "num_speculative_tokens": 0}, "at least 1"),
        ({"rate": 0.4, "num_draft_tokens": 4, "num_speculative_tokens": 4}, "would be 5"),
    ],
)
def test_impossible_figures_are_refused(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explain(**figures)


def test_run_prints_every_line() -> None:
    out = io.StringIO()
    args = ExplainArgs("explain", rate=0.42, tau=None, num_draft_tokens=4, num_speculative_tokens=None)
    run(args, Console(file=out, width=60))
    assert out.getvalue().splitlines() == explain(rate=0.42, num_draft_tokens=4)
