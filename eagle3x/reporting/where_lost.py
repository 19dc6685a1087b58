"""Where tau is lost, in which cell: what each rung of every diagnosed cell adds, side by side.

Rungs are steps of the ladder. Where other boundaries are fed than the drafter was trained on, the rung of the states is
two things: its offset and its states then are the effects of the 2x2 (docs/diagnosis.md), and the interaction is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.reporting.figures import Figure
from eagle3x.reporting.summary import CellSummary
from eagle3x.reporting.svg import Canvas, Scale, fitted, padded, tick_text
from eagle3x.reporting.words import figure, minus, numbers

COLUMNS = {
    "export": "as reloaded",
    "text": "as it is served",
    "offset": "boundaries fed",
    "states": "quantization, kernels",
    "serving": "the engine itself",
}
AFTER = {"trained": "training", "exported": "export", "responses": "text", "states": "states"}
"""What a rung is compared with, where the one above it was not climbed."""
STATE_KINDS = ("quantized_states", "attention", "engine_states")
WIDTH, TAU, PANELS, PANEL, GAP = 1120.0, 186.0, 348.0, 148.0, 8.0
HEAD, ROW = 48.0, 66.0
NAME = 24
"""Characters of a cell's name that fit."""


@dataclass(frozen=True)
class Share:
    """The change of tau in one column. None: there is none, and `said` is why; else `said` is what belongs to it."""

    change: Interval | None
    said: str = ""
    broken: bool = False


def shares(diagnosis: Mapping[str, Any]) -> dict[str, Share]:
    """What each column of `COLUMNS` adds in this cell."""
    return {
        "export": _step(diagnosis, "exported"),
        "text": _step(diagnosis, "responses"),
        **_states(diagnosis),
        "serving": _step(diagnosis, "served"),
    }


def where_lost_figure(found: Sequence[tuple[CellSummary, Mapping[str, Any]]]) -> Figure | None:
    """A row of each diagnosed cell, a column of each rung, one scale. None if no rung was climbed from another."""
    rows = [(cell, diagnosis, shares(diagnosis)) for cell, diagnosis in found]
    changes = [share.change for *_, row in rows for share in row.values() if share.change is not None]
    if not changes:
        return None
    bottom = HEAD + ROW * len(rows)
    canvas = Canvas(WIDTH, bottom + 44)
    low, high = padded(min(0.0, *(c.low for c in changes)), max(0.0, *(c.high for c in changes)))
    canvas.text(0, 18, "cell", "name")
    canvas.text(0, 36, "extracted → served", "note")
    canvas.text(TAU, 18, "τ", "name")
    canvas.text(TAU, 36, "as trained → as served", "note")
    for at, (name, what) in enumerate(COLUMNS.items()):
        left = PANELS + at * (PANEL + GAP)
        scale = Scale(low, high, left + 6, left + PANEL - 6)
        canvas.text(left + 6, 18, name, "name")
        canvas.text(left + 6, 36, what, "note")
        for i, (cell, _, row) in enumerate(rows):
            if row[name].broken:
                canvas.rect(left, HEAD + ROW * i + 3, PANEL, ROW - 6, "wrong-row", radius=6)
            _panel(canvas, scale, HEAD + ROW * i, row[name], f"{cell.label}, {name}")
        ticks = scale.ticks(4)
        for tick in ticks:
            canvas.line(scale(tick), bottom, scale(tick), bottom + 4, "rule")
            canvas.text(scale(tick), bottom + 18, tick_text(tick, ticks), "tick", "middle")
    said = "change of τ, tokens per verify step: left of the line is lost"
    canvas.text((PANELS + WIDTH) / 2, bottom + 38, said, "axis", "middle")
    for i, (cell, diagnosis, _) in enumerate(rows):
        y = HEAD + ROW * i
        canvas.line(0, y, WIDTH, y, "rule")
        canvas.text(0, y + 28, fitted(cell.label, NAME), "name")
        canvas.text(0, y + 46, fitted(_slots(cell.config), NAME + 2), "note")
        value, interval = _taus(diagnosis)
        canvas.text(TAU, y + 28, value, "value")
        canvas.text(TAU, y + 46, interval, "note")
    return Figure(
        "where-lost",
        "Where acceptance is lost, cell by cell",
        "Each column adds one thing to what is left of it, on the same prompts: dots are changes of τ, bars their"
        " intervals. Marked: significant, and enough to count. Matched: the boundaries trained on are fed. Where others"
        " are, offset and states are told apart on identical text; “both” is what they change together beyond the sum.",
        canvas.render(f"Change of acceptance length that each rung adds, by cell. {_spoken(rows)}."),
        wide=True,
    )


def _step(diagnosis: Mapping[str, Any], rung: str) -> Share:
    names = [r["name"] for r in diagnosis["rungs"]]
    if next(r for r in diagnosis["rungs"] if r["name"] == rung)["tau"] is None:
        return Share(None, "skipped")
    step = next((s for s in diagnosis["steps"] if s["rung"] == rung), None)
    if step is None:
        return Share(None, "first rung")
    straight = (step["above"], rung) in pairwise(names)
    said = "" if straight else f"after {AFTER[step['above']]}"
    return Share(Interval(**step["difference"]), said, rung in diagnosis["broken"])


def _states(diagnosis: Mapping[str, Any]) -> dict[str, Share]:
    """Offset and states. Which of the two broke the rung is what the causes say."""
    whole, grid = _step(diagnosis, "states"), diagnosis["offset_quantization"]
    if whole.change is None:
        return {"offset": whole, "states": whole}
    if grid is None or grid["hypothetical"]:
        return {"offset": Share(None, "matched" if diagnosis["fed"] == diagnosis["claimed"] else "in states"),
                "states": whole}  # fmt: skip
    kinds = {cause["kind"] for cause in diagnosis["causes"] if cause["rung"] == "states"}
    return {
        "offset": Share(_effect(grid["offset"]), numbers(grid["shifted"]), "offset_serving" in kinds),
        "states": Share(
            _effect(grid["states"]),
            f"both {_signed(grid['interaction']['value'])}",
            not kinds.isdisjoint(STATE_KINDS),
        ),
    }


def _panel(canvas: Canvas, scale: Scale, top: float, share: Share, what: str) -> None:
    y = top + 34
    canvas.line(scale(0), top, scale(0), top + ROW, "reference")
    if share.change is None:
        canvas.text(scale.start, y + 4, share.said, "note")
        return
    css = "c1" if share.broken else "c0"
    value, _, interval = figure(share.change, 3, True).partition(" ")
    canvas.text(scale.start, top + 20, value, "value")
    canvas.text(scale.start + 56, top + 20, share.said, "narrow note")
    canvas.line(scale(share.change.low), y, scale(share.change.high), y, f"{css} bar")
    canvas.dot(scale(share.change.value), y, f"{css} fill", f"{what}: {value} {interval} {share.said}".rstrip())
    canvas.text(scale.start, top + 55, interval, "narrow note")


def _taus(diagnosis: Mapping[str, Any]) -> tuple[str, str]:
    """tau of the first rung that was climbed and of the engine, and their intervals."""
    climbed = [rung for rung in diagnosis["rungs"] if rung["tau"] is not None]
    first, last = Interval(**climbed[0]["tau"]), diagnosis["rungs"][-1]["tau"]
    start, _, interval = figure(first).partition(" ")
    if last is None:
        return f"{start} → not served", interval
    end, _, at_last = figure(Interval(**last)).partition(" ")
    return f"{start} → {end}", f"{interval} → {at_last}"


def _slots(config: Mapping[str, Any]) -> str:
    return f"{_slot(config)} → {_slot(config['serve'])}"


def _slot(node: Mapping[str, Any]) -> str:
    scheme, attention = node["quantization"]["scheme"], node["attention"]["name"]
    words = (node["backend"]["name"], "" if scheme == "none" else scheme, "" if attention == "auto" else attention)
    return " ".join(word for word in words if word)


def _spoken(rows: Sequence[tuple[CellSummary, Mapping[str, Any], Mapping[str, Share]]]) -> str:
    def told(name: str, share: Share) -> str:
        if share.change is None:
            return f"{name} {share.said}"
        return f"{name} {_signed(share.change.value)}{' (lost)' if share.broken else ''}"

    return "; ".join(
        f"{cell.label}: τ {_taus(diagnosis)[0]}, {', '.join(told(name, share) for name, share in row.items())}"
        for cell, diagnosis, row in rows
    )


def _effect(record: Mapping[str, float]) -> Interval:
    return Interval(record["value"], record["low"], record["high"])


def _signed(value: float) -> str:
    return minus(f"{value:+.3f}")
