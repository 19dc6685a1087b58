from __future__ import annotations

from typing import Any

import pytest

from eagle3x.reporting.heat_map import drift_figure, level


def distance(error: float) -> dict[str, float]:
    return {"error": error, "error_p99": 2 * error, "cosine": 1 - error**2 / 2, "cosine_p1": 1 - error**2}


def record(errors: dict[int, float], offset: int = 0, last: float | None = None) -> dict[str, Any]:
    boundaries = [
        {"boundary": b, "own": distance(e), "nearest": b + offset, "offset": offset} for b, e in errors.items()
    ]
    return {"boundaries": boundaries, "last": None if last is None else distance(last)}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (0, 0),
        (9e-7, 0),
        (1.5e-6, 1),
        (2e-5, 2),
        (2e-4, 3),
        (2e-3, 4),
        (0.02, 5),
        (0.1, 6),
        (0.29, 6),
        (0.3, 7),
        (40, 7),
    ],
)
def test_a_colour_for_each_power_of_ten(error: float, expected: int) -> None:
    assert level(error) == expected


def test_figures_colours_and_offsets_are_drawn() -> None:
    figure = drift_figure(
        {"exact": record({2: 3.14e-7, 14: 0.0}, last=4e-6), "late <one>": record({14: 0.42, 26: 1.25}, offset=1)}
    )
    for shown in ("3.1e\u22127", ">0<", "4.0e\u22126", ">0.42<", ">1.25<", "is 15", "is 27", ">26<", ">last<"):
        assert shown in figure.svg
    assert figure.svg.count('class="heat h0"') == 2 + 1  # two squares and the key
    assert figure.svg.count('class="heat h7"') == 2 + 1
    assert "late &lt;one&gt;, boundary 14: error 0.42 (99th percentile 0.84)" in figure.svg
    assert "exact: 2 3.1e\u22127, 14 0, last 4.0e\u22126" in figure.svg
    assert not figure.wide


def test_many_boundaries_are_short() -> None:
    figure = drift_figure({"all": record({b: 10.0 ** (b / 4 - 7) for b in range(31)})})
    assert figure.wide
    for shown in (">1e\u22127<", ">.10<", ">.56<", ">2<"):
        assert shown in figure.svg


def test_no_cell_is_no_map() -> None:
    with pytest.raises(ValueError, match="at least one cell"):
        drift_figure({})
