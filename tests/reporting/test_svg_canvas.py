from __future__ import annotations

import pytest

from eagle3x.reporting.svg import Canvas, Scale, fitted, padded, tick_text


def test_scale_maps_ends_and_middle() -> None:
    scale = Scale(1.0, 2.0, 100.0, 300.0)
    assert (scale(1.0), scale(1.5), scale(2.0)) == (100.0, 200.0, 300.0)
    upwards = Scale(0.0, 10.0, 200.0, 0.0)
    assert upwards(10.0) == 0.0
    assert upwards(2.5) == 150.0


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0.0, 1.0, 5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.98, 1.43, 5, [1.0, 1.1, 1.2, 1.3, 1.4]),
        (-0.2, 0.01, 4, [-0.2, -0.1, 0.0]),
        (0.0, 286.0, 8, [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, count: int, expected: list[float]) -> None:
    assert Scale(low, high, 0, 1).ticks(count) == pytest.approx(expected)


def test_tick_text_has_the_decimals_that_all_need() -> None:
    assert tick_text(1.0, [1.0, 1.25]) == "1.00"
    assert tick_text(2000.0, [0.0, 2000.0]) == "2,000"
    assert tick_text(-0.5, [-0.5, 0.0]) == "\u22120.5"


def test_padding_is_never_empty() -> None:
    low, high = padded(3.0, 3.0)
    assert low < 3.0 < high
    assert padded(0.0, 10.0, 0.1) == (-1.0, 11.0)


def test_long_names_keep_both_ends() -> None:
    assert fitted("short", 9) == "short"
    assert fitted("abcdefghijklmnop", 9) == "abcd…mnop"
    assert len(fitted("x" * 100, 20)) == 20


def test_text_from_outside_is_escaped() -> None:
    canvas = Canvas(10, 10)
    canvas.text(0, 0, "<script>alert(1)</script>")
    canvas.dot(0, 0, "c0", 'a "tip" & more')
    drawn = canvas.render('alt "x" <y>')
    assert "<script>" not in drawn
    assert "&lt;script&gt;" in drawn
    assert "<title>a &quot;tip&quot; &amp; more</title>" in drawn
    assert 'aria-label="alt &quot;x&quot; &lt;y&gt;"' in drawn
