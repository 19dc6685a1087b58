"""Where tau is lost, cell by cell: the numbers of diagnoses made by hand, and where they are drawn."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from diagnoses import diagnosis

from eagle3x.reporting import report
from eagle3x.reporting.html import html_report
from eagle3x.reporting.summary import Summary
from eagle3x.reporting.where_lost import COLUMNS, PANEL, PANELS, shares, where_lost_figure

MINUS = "\u2212"


def told(found: dict[str, Any]) -> dict[str, tuple[float | None, str, bool]]:
    return {
        name: (None if share.change is None else round(share.change.value, 6), share.said, share.broken)
        for name, share in shares(found).items()
    }


def test_each_column_is_a_step_of_the_ladder_where_what_was_trained_is_fed() -> None:
    found = diagnosis((1.62, 1.62, 1.52, 1.5, 1.51), broken=("responses",),
                      grid={"offset": -0.3, "states": -0.02, "interaction": 0.1})  # fmt: skip
    assert told(found) == {
        "export": (0.0, "", False),
        "text": (-0.1, "", True),
        "offset": (None, "matched", False),  # the 2x2's offset is hypothetical: nobody fed it
        "states": (-0.02, "", False),
        "serving": (0.01, "", False),
    }


@pytest.mark.parametrize("kinds", [("offset_serving",), ("quantized_states",), ("offset_serving", "attention")])
def test_a_wrong_offset_stands_apart_from_the_states(kinds: tuple[str, ...]) -> None:
    found = diagnosis((1.6, 1.6, 1.6, 1.4, 1.4), broken=("states",), hypothetical=False,
                      causes=tuple((kind, "states", -0.1) for kind in kinds),
                      grid={"offset": -0.15, "states": -0.08, "interaction": 0.03})  # fmt: skip
    row = told(found)
    assert row["offset"] == (-0.15, "[3, 15, 27]", "offset_serving" in kinds)
    assert row["states"] == (-0.08, "both +0.030", kinds != ("offset_serving",))


def test_what_was_not_climbed_says_so() -> None:
    unserved = told(diagnosis((1.6, 1.6, None, None, None)))
    assert {unserved[name] for name in ("text", "offset", "states", "serving")} == {(None, "skipped", False)}
    attached = told(diagnosis((None, 1.6, 1.6, None, 1.5)))
    assert attached["export"] == (None, "first rung", False)
    assert attached["serving"] == (-0.1, "after text", False)


def diagnosed(make_cell: Any, *found: dict[str, Any]) -> Summary:
    cells = [make_cell(f"c{i}", prompts=8, timing=False) for i in range(len(found))]
    summary = report.summarize(cells, "x")
    return replace(
        summary,
        cells=tuple(
            replace(cell, label=f"cell {i}", diagnosis=diagnosed)
            for i, (cell, diagnosed) in enumerate(zip(summary.cells, found, strict=True))
        ),
    )


def test_all_panels_share_one_scale_and_a_zero_line(make_cell: Any) -> None:
    lossy = diagnosis((1.6, 1.6, 1.4, 1.4, 1.4), broken=("responses",))
    summary = diagnosed(make_cell, diagnosis(), lossy)
    drawn = where_lost_figure([(c, c.diagnosis) for c in summary.cells if c.diagnosis])
    assert drawn is not None
    dots = [tuple(map(float, at)) for at in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn.svg)]
    rows = sorted({y for _, y in dots})
    assert len(rows) == 2
    assert len(dots) == 2 * (len(COLUMNS) - 1)  # no offset: the boundaries are matched
    zeros = {float(x) for x in re.findall(r'<line x1="([\d.]+)"[^>]*class="reference"', drawn.svg)}
    assert len(zeros) == len(COLUMNS)
    assert {x for x, y in dots if y == rows[0]} <= zeros  # nothing was lost in the first cell
    (lost,) = {x for x, y in dots if y == rows[1]} - zeros
    text = PANELS + 156.0  # the second panel
    assert text < lost < min(z for z in zeros if z > lost) < text + PANEL
    assert drawn.svg.count('class="wrong-row"') == 1
    alt = re.search(r'aria-label="([^"]*)"', drawn.svg)
    assert alt is not None
    assert f"cell 1: τ 1.60 → 1.40, export +0.000, text {MINUS}0.200 (lost), offset matched" in alt[1]


def test_a_sweep_has_this_figure_and_a_single_cell_its_ladder(make_cell: Any) -> None:
    summary = diagnosed(make_cell, diagnosis(), diagnosis())
    many = html_report(summary)
    assert many.index('id="figure-where-lost"') < many.index('id="cells"')
    assert 'id="figure-ladder"' not in many
    one = html_report(replace(summary, cells=summary.cells[:1], comparisons=()))
    assert 'id="figure-ladder"' in one
    assert "where-lost" not in one


def test_nothing_is_drawn_where_nothing_was_climbed(make_cell: Any) -> None:
    summary = diagnosed(make_cell, diagnosis((None, 1.6, None, None, None)), diagnosis((None, 1.6, None, None, None)))
    assert where_lost_figure([(c, c.diagnosis) for c in summary.cells if c.diagnosis]) is None
