"""The report's figures of acceptance and speed: filled circles are what the engine did, hollow diamonds replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.reporting.summary import CellSummary, Measurement, Summary
from eagle3x.reporting.svg import Canvas, Scale, fitted, padded
from eagle3x.reporting.words import MINUS, TIMES, figure, percent, times

WIDTH = 560.0
NAME = 26
"""Characters of a cell's name that fit beside a row."""
LEFT, RIGHT = 192.0, 420.0
"""Where the plot area of a figure with row names begins and ends; the value is written right of it."""
COLOURS = 8

Measured = Sequence[tuple[CellSummary, Measurement]]


@dataclass(frozen=True)
class Figure:
    """A drawn figure. `alt` says in words what it shows; the page's tables hold the same values."""

    id: str
    title: str
    caption: str
    svg: str
    wide: bool = False


def acceptance_figures(summary: Summary) -> list[Figure]:
    """All figures for which the run has values, in reading order."""
    measured = summary.measured
    if not measured:
        return []
    drawn = [tau_figure(measured), survival_figure(measured)]
    if summary.comparisons:
        drawn.append(comparison_figure(summary))
    if any(m.speedup for _, m in measured):
        drawn.append(speedup_figure(measured))
    if any(m.per_category for _, m in measured):
        drawn.append(category_figure(measured))
    return drawn


def tau_figure(measured: Measured) -> Figure:
    """Acceptance length per cell with its interval, replay's prediction below it."""
    rows: list[tuple[str, str, Interval, Interval | None, bool]] = []
    for i, (cell, m) in enumerate(measured):
        replayed = None if m.replay is None else m.replay.tau
        rows.append(
            (cell.label if len(measured) > 1 else "all prompts", f"c{i % COLOURS}", m.tau, replayed, bool(m.mismatched))
        )
    if len(measured) == 1 and (clean := measured[0][1].tau_without_degenerate) is not None:
        rows.append(("without loops", "c0", clean, None, False))
    intervals = [i for _, _, tau, replayed, _ in rows for i in (tau, replayed) if i is not None]
    high = padded(1.0, max(i.high for i in intervals))[1]
    scale = Scale(min(1.0, *(i.low for i in intervals)), high, LEFT, RIGHT)
    step, top = 44.0, 14.0
    bottom = top + step * len(rows)
    canvas = Canvas(WIDTH, bottom + 42)
    for i, row in enumerate(rows):
        if row[4]:
            canvas.rect(0, top + step * i + 2, WIDTH, step - 4, "wrong-row", radius=6)
    canvas.x_axis(scale, bottom, top, "acceptance length τ, tokens per verify step", 5)
    canvas.line(scale(1), top, scale(1), bottom, "reference")
    for i, (name, css, tau, replayed, wrong) in enumerate(rows):
        y = top + step * (i + 0.5)
        shift = 0 if replayed is None else 7
        _name(canvas, y, name, "mismatched" if wrong else "")
        _whisker(canvas, scale, y - shift, tau, css, f"{name}: engine τ {figure(tau, 3)}")
        if replayed is not None:
            _predicted(canvas, scale, y + 8, replayed, css, f"{name}: replay τ {figure(replayed, 3)}")
        canvas.text(RIGHT + 14, y - shift + 4, figure(tau), "value")
        if replayed is not None:
            canvas.text(RIGHT + 14, y + 13, f"◇ {figure(replayed)}", "note")
    said = "; ".join(f"{n}: {figure(t)}" for n, _, t, _, _ in rows)
    return Figure(
        "tau",
        "Acceptance length",
        "● engine, ◇ replay's prediction; bars are intervals. τ = 1 means that no draft token was ever accepted.",
        canvas.render(f"Acceptance length per cell with interval. {said}."),
    )


def survival_figure(measured: Measured) -> Figure:
    """Share of verify steps in which the draft at position i was accepted, engine and replay."""
    left, right, top, bottom = 48.0, WIDTH - 16, 30.0, 216.0
    positions = max(m.num_speculative_tokens for _, m in measured)
    seen = [s.high for _, m in measured for s in m.survival]
    seen += [s for _, m in measured if m.replay for s in m.replay.survival]
    x, y = Scale(0.5, positions + 0.5, left, right), Scale(0, min(1.0, max(seen) * 1.08 or 1.0), bottom, top)
    legend = len(measured) > 1
    canvas = Canvas(WIDTH, bottom + 42 + (18 * len(measured) + 6 if legend else 0))
    canvas.y_axis(y, left, right, "share of verify steps")
    for position in range(1, positions + 1):
        canvas.text(x(position), bottom + 18, str(position), "tick", "middle")
    canvas.text((left + right) / 2, bottom + 36, "draft position", "axis", "middle")
    spread = min(0.08, 0.35 / len(measured))
    for i, (cell, m) in enumerate(measured):
        css = f"c{i % COLOURS}"
        middle = (i - (len(measured) - 1) / 2) * spread * 2
        predicted = m.replay.survival if m.replay else ()
        shift = spread / 2 if predicted else 0.0
        _links(canvas, [(x(p + 1 + middle - shift), y(s.value)) for p, s in enumerate(m.survival)], css)
        for p, s in enumerate(m.survival, 1):
            at = x(p + middle - shift)
            canvas.line(at, y(s.low), at, y(s.high), f"{css} bar")
            tip = f"{cell.label}, position {p}: {percent(s.value, 1)} [{percent(s.low, 1)}, {percent(s.high, 1)}]"
            canvas.dot(at, y(s.value), f"{css} fill", tip)
        for p, share in enumerate(predicted, 1):
            tip = f"{cell.label}, replay, position {p}: {percent(share, 1)}"
            canvas.diamond(x(p + middle + shift), y(share), f"{css} hollow", tip)
        if len(measured) == 1:
            for p, s in enumerate(m.survival, 1):
                canvas.text(x(p + 0.09), y(s.value) + 4, percent(s.value, 1), "value")
    if legend:
        _legend(canvas, measured, bottom + 58)
    said = "; ".join(f"{c.label}: {', '.join(percent(s.value, 1) for s in m.survival)}" for c, m in measured)
    return Figure(
        "survival",
        "Survival by draft position",
        "Share of verify steps in which the draft token here, and all before it, was accepted. ● engine, ◇ replay.",
        canvas.render(f"Survival by draft position. {said}."),
    )


def category_figure(measured: Measured) -> Figure:
    """Acceptance length per category of prompts."""
    names = sorted({name for _, m in measured for name in m.per_category})
    intervals = [i for _, m in measured for i in m.per_category.values()]
    high = padded(1.0, max(i.high for i in intervals))[1]
    scale = Scale(min(1.0, *(i.low for i in intervals)), high, LEFT, RIGHT)
    step, top = max(26.0, 12.0 + 13.0 * len(measured)), 14.0
    bottom = top + step * len(names)
    legend = len(measured) > 1
    canvas = Canvas(WIDTH, bottom + 42 + (18 * len(measured) + 6 if legend else 0))
    canvas.x_axis(scale, bottom, top, "acceptance length τ, tokens per verify step", 5)
    canvas.line(scale(1), top, scale(1), bottom, "reference")
    for row, name in enumerate(names):
        middle = top + step * (row + 0.5)
        if row:
            canvas.line(0, middle - step / 2, WIDTH, middle - step / 2, "rule")
        _name(canvas, middle, name)
        for i, (cell, m) in enumerate(measured):
            tau = m.per_category.get(name)
            if tau is None:
                continue
            y = middle + (i - (len(measured) - 1) / 2) * 13
            _whisker(canvas, scale, y, tau, f"c{i % COLOURS}", f"{cell.label}, {name}: τ {figure(tau, 3)}", 4)
            canvas.text(RIGHT + 14, y + 4, figure(tau), "value" if len(measured) == 1 else "note")
    if legend:
        _legend(canvas, measured, bottom + 58)
    return Figure(
        "categories",
        "Acceptance length by category",
        "Few prompts per category make wide intervals: read differences with care.",
        canvas.render(f"Acceptance length for {len(names)} categories of prompts: {', '.join(names)}."),
    )


def speedup_figure(measured: Measured) -> Figure:
    """Time without the drafter over time with it, decoding alone and end to end."""
    rows: list[tuple[str, str, Interval, Interval]] = []
    for i, (cell, m) in enumerate(measured):
        for concurrency, s in m.speedup.items():
            name = (
                f"concurrency {concurrency}"
                if len(measured) == 1
                else fitted(cell.label, NAME - 4) + f" @{concurrency}"
            )
            rows.append((name, f"c{i % COLOURS}", s.decode, s.end_to_end))
    values = [v for _, _, d, e in rows for i in (d, e) for v in (i.low, i.high)]
    scale = Scale(*padded(min(1.0, *values), max(1.0, *values)), LEFT, RIGHT)
    step, top = 44.0, 14.0
    bottom = top + step * len(rows)
    canvas = Canvas(WIDTH, bottom + 42)
    canvas.rect(LEFT, top, scale(1) - LEFT, bottom - top, "slower")
    canvas.x_axis(scale, bottom, top, "speed-up, time without / time with the drafter", 5)
    canvas.line(scale(1), top, scale(1), bottom, "reference")
    for i, (name, css, decode, end_to_end) in enumerate(rows):
        y = top + step * (i + 0.5)
        _name(canvas, y, name)
        _whisker(canvas, scale, y - 8, decode, css, f"{name}, decode: {times(decode)}")
        _whisker(canvas, scale, y + 9, end_to_end, f"{css} faint", f"{name}, end to end: {times(end_to_end)}", 4)
        canvas.text(RIGHT + 14, y - 4, times(decode), "value")
        canvas.text(RIGHT + 14, y + 13, f"{end_to_end.value:.2f}{TIMES} end to end", "note")
    said = "; ".join(f"{n}: decode {times(d)}, end to end {times(e)}" for n, _, d, e in rows)
    return Figure(
        "speedup",
        "Speed-up",
        "Upper mark: decoding alone. Lower mark: end to end with the prefill. Shaded: the drafter costs time.",
        canvas.render(f"Speed-up with interval. {said}."),
    )


def comparison_figure(summary: Summary) -> Figure:
    """Paired differences of tau, with the difference that replay predicts."""
    comparisons = summary.comparisons
    both = [i for p in comparisons for i in (p.difference, p.replay_difference) if i is not None]
    low, high = min(0.0, *(i.low for i in both)), max(0.0, *(i.high for i in both))
    scale = Scale(*padded(low, high), 190.0, 396.0)
    step, top = 48.0, 14.0
    bottom = top + step * len(comparisons)
    canvas = Canvas(WIDTH, bottom + 42)
    canvas.x_axis(scale, bottom, top, "difference of τ, tokens per verify step", 4)
    canvas.line(scale(0), top, scale(0), bottom, "reference")
    for i, p in enumerate(comparisons):
        y = top + step * (i + 0.5)
        canvas.text(8, y - 3, fitted(summary.label(p.cell), 27), "name")
        canvas.text(8, y + 12, "against " + fitted(summary.label(p.baseline), 20), "note")
        css = "c0" if p.difference.contains(0) else "c1"
        shift = 7 if p.replay_difference else 0
        _whisker(
            canvas,
            scale,
            y - shift,
            p.difference,
            css,
            f"{summary.label(p.cell)} {MINUS} {summary.label(p.baseline)}: {figure(p.difference, 3, True)}",
        )
        canvas.text(410.0, y - shift + 4, figure(p.difference, 2, True), "value")
        if p.replay_difference is not None:
            tip = f"replay predicts {figure(p.replay_difference, 3, True)}"
            _predicted(canvas, scale, y + 8, p.replay_difference, css, tip)
            canvas.text(410.0, y + 13, f"◇ {figure(p.replay_difference, 2, True)}", "note")
    said = "; ".join(
        f"{summary.label(p.cell)} minus {summary.label(p.baseline)}: {figure(p.difference, 2, True)}"
        for p in comparisons
    )
    return Figure(
        "comparisons",
        "Paired differences",
        "Same prompts in both cells. ● measured, ◇ what replay predicts. An interval that holds 0 shows no difference.",
        canvas.render(f"Paired differences of acceptance length. {said}."),
    )


def _name(canvas: Canvas, y: float, name: str, note: str = "") -> None:
    canvas.text(8, y + (-1 if note else 4), fitted(name, NAME), "name")
    if note:
        canvas.text(8, y + 13, note, "wrong")


def _whisker(canvas: Canvas, scale: Scale, y: float, i: Interval, css: str, tip: str, radius: float = 5) -> None:
    canvas.line(scale(i.low), y, scale(i.high), y, f"{css} bar")
    canvas.dot(scale(i.value), y, f"{css} fill", tip, radius)


def _predicted(canvas: Canvas, scale: Scale, y: float, i: Interval, css: str, tip: str) -> None:
    canvas.line(scale(i.low), y, scale(i.high), y, f"{css} thin")
    canvas.diamond(scale(i.value), y, f"{css} hollow", tip)


def _links(canvas: Canvas, points: list[tuple[float, float]], css: str) -> None:
    if len(points) > 1:
        canvas.path(points, f"{css} link")


def _legend(canvas: Canvas, measured: Measured, y: float) -> None:
    for i, (cell, m) in enumerate(measured):
        canvas.dot(14, y + 18 * i - 4, f"c{i % COLOURS} fill")
        canvas.text(28, y + 18 * i, fitted(cell.label, 64) + (" (mismatched)" if m.mismatched else ""), "label")
