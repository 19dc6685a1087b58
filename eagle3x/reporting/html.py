"""report.html: one file that opens offline. Figures are inline SVG; nothing is loaded from anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from eagle3x.reporting.diagnosis import diagnosed, ladder_figure
from eagle3x.reporting.entries import Tone
from eagle3x.reporting.figures import acceptance_figures
from eagle3x.reporting.heat_map import drift_figure
from eagle3x.reporting.run_figures import run_figures
from eagle3x.reporting.summary import IdenticalOutputs, Measurement, Summary
from eagle3x.reporting.tables import all_tables, match, rate
from eagle3x.reporting.where_lost import where_lost_figure
from eagle3x.reporting.words import NONE, TIMES, count, figure, numbers, percent, seconds, times


@dataclass(frozen=True)
class Tile:
    """One figure of the first screen."""

    label: str
    value: str
    note: str
    tone: Tone = ""


def html_report(summary: Summary) -> str:
    """The whole page. All text from outside is escaped; the figures escape theirs when drawn."""
    environment = Environment(
        loader=PackageLoader("eagle3x.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    first, _, rest = summary.headline.partition("; ")
    found = diagnosed(summary)
    lost = where_lost_figure(found) if len(found) > 1 else None
    drifts = {cell.label: diagnosis["drift"]["states"] for cell, diagnosis in found if diagnosis["drift"]}
    figures = [
        *([ladder_figure(found[0][1])] if len(found) == 1 else []),
        *acceptance_figures(summary),
        *run_figures(summary),
    ]
    figures += [drift_figure(drifts)] if drifts else []
    figures.sort(key=lambda f: f.id == "categories")  # the tallest last, so that the columns end about level
    return environment.get_template("report.html").render(
        summary=summary,
        first=first,
        rest=rest[:1].upper() + rest[1:],
        tiles=tiles(summary),
        failed=[c for c in summary.cells if c.error is not None],
        tables=all_tables(summary),
        first_figures=[(lost, Markup(lost.svg))] if lost else [],  # noqa: S704 (drawn by svg.py, which escapes)
        figures=[(f, Markup(f.svg)) for f in figures if not f.wide],  # noqa: S704
        wide_figures=[(f, Markup(f.svg)) for f in figures if f.wide],  # noqa: S704
        configs=[(c.name, json.dumps(c.config, indent=2, ensure_ascii=False)) for c in summary.cells],
        style=Markup(environment.get_template("report.css").render()),  # noqa: S704 (our own file)
    )


def tiles(summary: Summary) -> list[Tile]:
    """The figures of the first screen."""
    measured = summary.measured
    if len(summary.cells) == 1 and measured:
        return _one(measured[0][1])
    found: list[Tile] = []
    failed = len(summary.cells) - len(measured)
    ok = f"{failed} failed" if failed else "all have figures"
    found.append(Tile("cells", str(len(summary.cells)), ok, "bad" if failed else ""))
    if not measured:
        return found
    cell, best = max(measured, key=lambda pair: pair[1].tau.value)
    found.append(Tile("highest τ", f"{best.tau.value:.2f}", f"{_range(figure(best.tau))} in {cell.label}"))
    wrong = [c.label for c, m in measured if m.mismatched]
    found.append(
        Tile("mismatched", f"{len(wrong)} of {len(measured)}", "; ".join(wrong) or "none", "bad" if wrong else "good")
    )
    replayed = [m.replay for _, m in measured if m.replay]
    if replayed:
        same, of = sum(r.identical_counters for r in replayed), sum(r.requests for r in replayed)
        found.append(
            Tile("replay = engine", f"{same} of {of}", "requests with equal counters, all cells", _whole(same, of))
        )
    spent = sum(s.wall_seconds for c in summary.cells for s in c.stages.values() if not s.reused)
    saved = sum(s.wall_seconds for c in summary.cells for s in c.stages.values() if s.reused)
    found.append(Tile("time spent", seconds(spent), f"{seconds(saved)} saved by reuse"))
    return found


def _one(m: Measurement) -> list[Tile]:
    found = [
        Tile("acceptance length τ", f"{m.tau.value:.2f}", f"{_range(figure(m.tau))}, {percent(m.confidence)} interval"),
    ]
    if m.replay:
        same, of = m.replay.identical_counters, m.replay.requests
        found.append(
            Tile(
                "replay = engine",
                f"{same} of {of}",
                f"requests with equal counters: {m.replay.verdict}",
                _whole(same, of),
            )
        )
    if m.speedup:
        concurrency, s = next(iter(m.speedup.items()))
        tone: Tone = "good" if s.decode.low > 1 else "bad" if s.decode.high < 1 else ""
        note = f"{_range(times(s.decode))}, concurrency {concurrency}; end to end {s.end_to_end.value:.2f}{TIMES}"
        found.append(Tile("decode speed-up", f"{s.decode.value:.2f}{TIMES}", note, tone))
        if s.step_cost is not None:
            note = "plain decode steps, its drafts included"
            found.append(Tile("a verify step costs", f"{s.step_cost:.2f}", note))
    else:
        found.append(Tile("decode speed-up", NONE, "not measured (benchmark.timing=false)"))
    found.append(_outputs_tile(m.identical_outputs))
    said = match(m)
    trained = "not known" if m.boundaries.trained is None else numbers(m.boundaries.trained)
    found.append(Tile("boundaries", said.text, f"trained {trained}, fed {numbers(m.boundaries.fed)}", said.tone))
    return found


def _outputs_tile(same: IdenticalOutputs | None) -> Tile:
    if same is None:
        return Tile("identical outputs", NONE, "not compared: the target was not served without the drafter")
    note = (
        f"{count(len(same.differences), 'difference')} listed below"
        if same.differences
        else "with and without the drafter"
    )
    tone = "bad" if same.lossy else "good" if same.rate == 1 else ""
    if same.differences:
        note += f", {same.lossy} of them lossy" if same.lossy else ", all near-ties" if _all_ties(same) else ""
    return Tile("identical outputs", rate(same.rate), note, tone)


def _all_ties(same: IdenticalOutputs) -> bool:
    return all(d["near_tie"] for d in same.differences)


def _range(text: str) -> str:
    return text[text.index("[") :]


def _whole(part: int, of: int) -> Tone:
    return "good" if part == of else ""
