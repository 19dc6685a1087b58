"""The heat map of drift: one row for each cell, one column for each boundary, coloured by how far its states are."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log10
from typing import Any

from eagle3x.reporting.figures import Figure
from eagle3x.reporting.svg import Canvas, fitted
from eagle3x.reporting.words import minus

LEVELS = 8
"""Colours: h0 up to an error of 1e-6, then one for each power of ten, and the last two from 0.1 and 0.3 on."""
NAMES = ("below", "1e-6", "1e-5", "1e-4", "1e-3", "0.01", "0.1", "0.3")
LEFT, TOP, ROW = 200.0, 34.0, 40.0
NARROW, WIDE = 36.0, 62.0
"""Widths of a square: as many boundaries as a whole target has, or as few as a drafter reads."""
FEW = 12
NAME = 24
"""Characters of a cell's name that fit beside a row."""


def drift_figure(drifts: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Of each cell's `Drift.as_dict()`, by the cell's name. ValueError if there is none.

    A square's figure is the median relative error; below it, where a capture is nearer to another boundary, which.
    """
    if not drifts:
        raise ValueError("a heat map needs at least one cell")
    boundaries = sorted({b["boundary"] for found in drifts.values() for b in found["boundaries"]})
    columns = [*map(str, boundaries), *(["last"] if any(found["last"] for found in drifts.values()) else [])]
    width = WIDE if len(columns) <= FEW else NARROW
    right, bottom = LEFT + width * len(columns), TOP + ROW * len(drifts)
    canvas = Canvas(max(right, LEFT + WIDE * LEVELS) + 8, bottom + 62)
    canvas.text(LEFT, 12, "boundary", "axis")
    for i, name in enumerate(columns):
        canvas.text(LEFT + width * (i + 0.5), TOP - 6, name, "tick", "middle")
    said = []
    for row, (cell, found) in enumerate(drifts.items()):
        y = TOP + ROW * row
        canvas.text(LEFT - 12, y + ROW / 2 + 4, fitted(cell, NAME), "name", "end")
        squares = {str(b["boundary"]): (b["own"], b["nearest"], b["offset"]) for b in found["boundaries"]}
        if found["last"]:
            squares["last"] = (found["last"], None, 0)
        for i, name in enumerate(columns):
            if name in squares:
                _square(canvas, LEFT + width * i, y, width, (cell, name), *squares[name])
        said.append(f"{cell}: " + ", ".join(f"{name} {_figure(squares[name][0]['error'])}" for name in squares))
    _key(canvas, bottom + 22)
    return Figure(
        "drift",
        "Drift of the hidden states",
        "Median relative error of a token's state against the reference, by boundary; the first tokens of a text are"
        " left out. “is 15” names the boundary that a capture is nearer to than to its own.",
        canvas.render(f"Relative error of hidden states against the reference. {'; '.join(said)}."),
        wide=len(columns) > FEW,
    )


def level(error: float) -> int:
    """0 to LEVELS - 1: the colour of an error."""
    if error >= 0.3:
        return LEVELS - 1
    return 0 if error <= 1e-6 else floor(log10(error)) + 7


def _square(
    canvas: Canvas, x: float, y: float, width: float, name: tuple[str, str], own: Mapping[str, float],
    nearest: int | None, offset: int,
) -> None:  # fmt: skip
    colour = level(own["error"])
    text = ("heat-over" if colour >= LEVELS - 2 else "heat-value") + (" narrow" if width == NARROW else "")
    cell, column = name
    place = "last hidden state" if column == "last" else f"boundary {column}"
    tip = (
        f"{cell}, {place}: error {own['error']:.2g} (99th percentile {own['error_p99']:.2g}), cosine"
        f" {own['cosine']:.6f}{f'; nearest to boundary {nearest}' if offset else ''}"
    )
    canvas.rect(x + 1, y + 1, width - 2, ROW - 2, f"heat h{colour}", tip, 4)
    shown = _figure(own["error"]) if width == WIDE else _short(own["error"])
    canvas.text(x + width / 2, y + (ROW / 2 - 2 if offset else ROW / 2 + 4), shown, text, "middle")
    if offset:
        canvas.text(x + width / 2, y + ROW / 2 + 12, f"is {nearest}", text, "middle")


def _key(canvas: Canvas, y: float) -> None:
    """Below the squares: which colour is which error."""
    for i, name in enumerate(NAMES):
        x = LEFT + WIDE * i
        canvas.rect(x + 1, y, WIDE - 2, 10, f"heat h{i}", radius=2)
        canvas.text(x + WIDE / 2, y + 26, minus(name), "tick", "middle")
    canvas.text(LEFT - 12, y + 10, "error from", "axis", "end")


def _figure(error: float) -> str:
    """`0.12`, `3.4e−5`."""
    if error == 0:
        return "0"
    if error >= 0.01:
        return f"{error:.2f}"
    return _scientific(error, 1)


def _short(error: float) -> str:
    """For narrow squares: `.12`, `3e−5`."""
    if error == 0 or error >= 0.995:
        return f"{error:.0f}"
    if error >= 0.01:
        return f"{error:.2f}"[1:]
    return _scientific(error, 0)


def _scientific(error: float, digits: int) -> str:
    mantissa, exponent = f"{error:.{digits}e}".split("e")
    return minus(f"{mantissa}e{int(exponent)}")
