"""Controls: cells in which something was broken on purpose. Was it named, and nothing else?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3x.benchmark.statistics import Interval
from eagle3x.diagnosis.planted import Fault, called
from eagle3x.reporting.entries import Entry, Table
from eagle3x.reporting.summary import CellSummary, Control, PairedDifference, Summary
from eagle3x.reporting.verdict import SPOKEN
from eagle3x.reporting.words import NONE, figure


def find_controls(cells: Sequence[CellSummary], comparisons: Sequence[PairedDifference]) -> list[Control]:
    """The diagnosed cells, if something is planted in one of them."""
    found = [(cell, cell.diagnosis) for cell in cells if cell.diagnosis is not None]
    if not any(_planted(cell.config) for cell, _ in found):
        return []
    healthy = {cell.name for cell, _ in found if not _planted(cell.config)}
    against = {p.cell: p for p in comparisons if p.baseline in healthy}
    return [
        Control(
            cell.label,
            _planted(cell.config),
            tuple(cause["kind"] for cause in diagnosis["causes"]),
            tuple(cause["sentence"] for cause in diagnosis["causes"]),
            tuple(diagnosis["broken"]),
            *_differences(against.get(cell.name)),
        )
        for cell, diagnosis in found
    ]


def controls_table(summary: Summary) -> Table:
    """One row per control."""
    rows = [
        (
            Entry(c.cell),
            Entry(_words([called(fault).kind for fault in c.planted]), note=", ".join(c.planted)),
            Entry(_words(c.named), note="; ".join(c.sentences)),
            Entry("right" if c.right else "WRONG", "good" if c.right else "bad"),
            Entry(", ".join(c.rungs) or NONE),
            _estimate(c.tau_lost),
            _estimate(c.predicted),
        )
        for c in summary.controls
    ]
    headers = ("cell", "planted", "named", "so", "broken rungs", "change of τ", "replay predicts")
    right = sum(c.right for c in summary.controls)
    note = f"{right} of {len(rows)} cells are diagnosed right: exactly what was planted is named, and nothing else."
    return Table("controls", "Controls", note, headers, tuple(rows))


def _planted(config: Mapping[str, Any]) -> tuple[Fault, ...]:
    return tuple(config.get("planted", ()))


def _differences(pair: PairedDifference | None) -> tuple[Interval | None, Interval | None]:
    return (None, None) if pair is None else (pair.difference, pair.replay_difference)


def _words(kinds: Sequence[str]) -> str:
    return "; ".join(SPOKEN[kind] for kind in kinds) or "nothing"


def _estimate(difference: Interval | None) -> Entry:
    value, _, interval = figure(difference, 3, True).partition(" ")
    return Entry(value, note=interval)
