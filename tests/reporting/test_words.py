from __future__ import annotations

import pytest

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.reporting.words import count, figure, numbers, percent, seconds, times


def test_figures_carry_their_interval() -> None:
    i = Interval(1.376, 1.3149, 1.455)
    assert figure(i) == "1.38 [1.31, 1.46]" or figure(i) == "1.38 [1.31, 1.45]"
    assert figure(i, 1) == "1.4 [1.3, 1.5]"
    assert figure(Interval(-0.164, -0.18, 0.02), 2, signed=True) == "\u22120.16 [\u22120.18, +0.02]"
    assert figure(None) == "\u2013"
    assert times(Interval(0.8, 0.75, 0.85)) == "0.80\u00d7 [0.75, 0.85]"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.44, "0.4 s"),
        (42.4, "42 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds(value: float, said: str) -> None:
    assert seconds(value) == said


def test_other_words() -> None:
    assert percent(0.3814) == "38 %"
    assert percent(0.3814, 1) == "38.1 %"
    assert percent(None) == "\u2013"
    assert count(1, "prompt") == "1 prompt"
    assert count(1200, "prompt") == "1,200 prompts"
    assert numbers((2, 14, 26)) == "[2, 14, 26]"
