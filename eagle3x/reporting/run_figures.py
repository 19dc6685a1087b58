"""The report's figures of how a run was made: boundaries, training, and where the time went."""

from __future__ import annotations

from itertools import pairwise

from eagle3x.reporting.curves import Curves, thinned
from eagle3x.reporting.entries import Entry
from eagle3x.reporting.figures import COLOURS, WIDTH, Figure
from eagle3x.reporting.summary import STAGES, Boundaries, CellSummary, Summary
from eagle3x.reporting.svg import Canvas, Scale, fitted, padded
from eagle3x.reporting.tables import match
from eagle3x.reporting.words import MINUS, numbers, seconds

MOST_POINTS = 150
"""Of a curve: more would be noise, and a page too big to mail."""


def run_figures(summary: Summary) -> list[Figure]:
    """All figures for which the run has values, in reading order."""
    drawn: list[Figure] = []
    if summary.measured:
        drawn.append(boundary_figure(summary))
    if trained := _drafters(summary):
        drawn.append(loss_figure(trained))
        if any(curves.val_tau for _, curves in trained):
            drawn.append(validation_figure(trained))
    if any(c.stages for c in summary.cells):
        drawn.append(time_figure(summary))
    return drawn


def boundary_figure(summary: Summary) -> Figure:
    """Per cell the boundaries trained on (above) and those predicted to be fed (below), each column linked."""
    measured = summary.measured
    top, step = 2.0, 104.0
    canvas = Canvas(WIDTH, top + step * len(measured))
    for i, (cell, m) in enumerate(measured):
        _boundaries(canvas, top + step * i, cell.label, m.boundaries, match(m))
    said = "; ".join(
        f"{c.label}: trained on {numbers(m.boundaries.trained or ())}, fed {numbers(m.boundaries.fed)}"
        for c, m in measured
    )
    return Figure(
        "boundaries",
        "Boundaries: trained on and fed",
        "Boundary b is the residual stream after b of the target's blocks. Above: what the drafter learned from."
        " Below: what the engine feeds it: as predicted, or as the serve probe found. Red links are columns that"
        " are not what the drafter learned.",
        canvas.render(f"Boundaries of the residual stream. {said}."),
    )


def loss_figure(trained: list[tuple[str, Curves]]) -> Figure:
    """The loss of each TTT step over training, one panel per drafter."""
    height, left, right = 190.0, 48.0, WIDTH - 92
    head = 46.0 if len(trained) > 1 else 30.0
    canvas = Canvas(WIDTH, (height + head + 22) * len(trained))
    for panel, (name, curves) in enumerate(trained):
        top = head + (height + head + 22) * panel
        lines = [thinned(line, MOST_POINTS) for line in curves.loss]
        points = [p for line in lines for p in line]
        last = max(s for s, _ in points)
        x = Scale(0, max(last, 1), left, right)
        y = Scale(*padded(min(v for _, v in points), max(v for _, v in points)), top + height - 24, top)
        if len(trained) > 1:
            canvas.text(left, top - 28, f"drafter {panel + 1}: {fitted(name, 56)}", "name")
        canvas.y_axis(y, left, right, "loss")
        canvas.x_axis(x, top + height - 24, top, "optimizer step")
        ends = _spread([y(line[-1][1]) for line in lines], 14)
        for k, line in enumerate(lines):
            canvas.path([(x(s), y(v)) for s, v in line], f"c{k % COLOURS} curve")
            canvas.text(right + 8, ends[k] + 4, f"TTT step {k}", f"c{k % COLOURS} own")
    said = "; ".join(
        f"{name}: " + ", ".join(f"step {k} from {line[0][1]:.2f} to {line[-1][1]:.2f}" for k, line in enumerate(c.loss))
        for name, c in trained
    )
    diverged = [f" Drafter of “{n}” diverged at step {c.diverged_at}." for n, c in trained if c.diverged_at is not None]
    return Figure(
        "loss",
        "Training loss by TTT step",
        f"Step 0 reads the target's states, step k the drafter's own output of step k {MINUS} 1."
        " Means over runs of optimizer steps." + "".join(diverged),
        canvas.render(f"Training loss. {said}."),
    )


def validation_figure(trained: list[tuple[str, Curves]]) -> Figure:
    """Acceptance length on the validation split, by replay, over training."""
    left, right, top, bottom = 48.0, WIDTH - 40, 30.0, 200.0
    trained = [(n, c) for n, c in trained if c.val_tau]
    points = [p for _, c in trained for p in c.val_tau]
    x = Scale(0, max(s for s, _ in points) or 1, left, right)
    y = Scale(*padded(min(1.0, *(v for _, v in points)), max(v for _, v in points)), bottom, top)
    legend = len(trained) > 1
    canvas = Canvas(WIDTH, bottom + 42 + (18 * len(trained) + 6 if legend else 0))
    canvas.y_axis(y, left, right, "τ on the validation split, tokens per verify step")
    canvas.x_axis(x, bottom, top, "optimizer step")
    for i, (name, curves) in enumerate(trained):
        css = f"c{i % COLOURS}"
        canvas.path([(x(s), y(v)) for s, v in curves.val_tau], f"{css} curve")
        for s, v in curves.val_tau:
            canvas.dot(x(s), y(v), f"{css} fill", f"{name}, step {s}: τ {v:.3f}", 3.5)
        if curves.best is not None:
            s, v = curves.best
            canvas.dot(x(s), y(v), f"{css} ring", f"{name}: kept, step {s}", 9)
            canvas.text(x(s), y(v) - 14, f"{v:.2f} kept", "value", "end" if x(s) > right - 40 else "middle")
        if legend:
            canvas.dot(14, bottom + 54 + 18 * i, f"{css} fill")
            canvas.text(28, bottom + 58 + 18 * i, f"drafter {i + 1}: {fitted(name, 58)}", "label")
    said = "; ".join(f"{n}: best {c.best[1]:.2f} at step {c.best[0]}" for n, c in trained if c.best)
    return Figure(
        "validation",
        "Acceptance length while training",
        "By replay of held-out text. The ringed checkpoint, best by τ, was kept.",
        canvas.render(f"Validation acceptance length over training. {said}."),
    )


def time_figure(summary: Summary) -> Figure:
    """Wall time per stage and cell; what was reused from an earlier run or cell is hatched."""
    left, right = 168.0, 1040.0
    cells = [c for c in summary.cells if c.stages]
    totals = [sum(s.wall_seconds for s in c.stages.values()) for c in cells]
    scale = Scale(0, max(*totals, 0.1), left, right)
    top, step = 40.0, 34.0
    bottom = top + step * len(cells)
    canvas = Canvas(1120, bottom + 42)
    stages = [s for s in STAGES if any(s in c.stages for c in cells)]
    at = left
    for stage in stages:
        canvas.rect(at, 8, 12, 12, f"c{STAGES.index(stage) % COLOURS} solid", radius=3)
        canvas.text(at + 18, 18, stage, "label")
        at += 40 + 7.2 * len(stage)
    canvas.rect(at, 8, 12, 12, "reused-key", radius=3)
    canvas.text(at + 18, 18, "reused, not made again", "label")
    canvas.x_axis(scale, bottom, top, "seconds", 8)
    for row, cell in enumerate(cells):
        y, x = top + step * row + 6, left
        canvas.text(8, y + 15, fitted(cell.label if len(cells) > 1 else "this run", 22), "name")
        for stage in stages:
            cost = cell.stages.get(stage)
            if cost is None:
                continue
            width = cost.wall_seconds / (scale.high or 1) * (right - left)
            reused = " reused" if cost.reused else ""
            tip = f"{cell.label}, {stage}: {seconds(cost.wall_seconds)}{', reused' if reused else ''}"
            canvas.rect(x, y, width, step - 12, f"c{STAGES.index(stage) % COLOURS} solid{reused}", tip, 2)
            if width > 44:
                canvas.text(x + width / 2, y + 15, seconds(cost.wall_seconds), f"in-bar{reused}", "middle")
            x += width
        spent = sum(s.wall_seconds for s in cell.stages.values() if not s.reused)
        canvas.text(x + 8, y + 15, seconds(spent), "value")
    said = "; ".join(
        f"{c.label}: " + ", ".join(f"{n} {seconds(s.wall_seconds)}" for n, s in c.stages.items()) for c in cells
    )
    return Figure(
        "time",
        "Where the time went",
        "Wall time by stage; the figure at the end is what this run spent itself.",
        canvas.render(f"Wall time by stage. {said}."),
        wide=True,
    )


def _drafters(summary: Summary) -> list[tuple[str, Curves]]:
    """Each trained drafter once, named after the first cell that uses it."""
    found: dict[str, tuple[str, Curves]] = {}
    for cell in summary.cells:
        if cell.curves is not None and cell.curves.loss and all(cell.curves.loss):
            found.setdefault(_drafter_key(cell), (cell.label, cell.curves))
    return list(found.values())


def _drafter_key(cell: CellSummary) -> str:
    return cell.stages["drafter"].key if "drafter" in cell.stages else cell.name


def _boundaries(canvas: Canvas, top: float, name: str, b: Boundaries, said: Entry) -> None:
    last, trained = b.num_blocks, b.trained or ()
    scale = Scale(0, last, 92, WIDTH - 24)
    upper, lower = top + 44, top + 78
    canvas.text(8, top + 14, fitted(name, 50), "name")
    canvas.text(WIDTH - 8, top + 14, said.text, {"bad": "wrong", "good": "right"}.get(said.tone, "label"), "end")
    for y, label in ((upper, "trained on"), (lower, "fed")):
        canvas.text(8, y + 4, label, "label")
        canvas.line(scale(0), y, scale(last), y, "rail")
        for boundary in range(last + 1):
            canvas.line(scale(boundary), y - 3, scale(boundary), y + 3, "rail")
    for learned, fed in zip(trained, b.fed, strict=False):
        canvas.curve(scale(learned), upper, scale(fed), lower, "bad-link" if learned != fed else "good-link")
    for values, y, dy in ((trained, upper, -10), (b.fed, lower, 19)):
        for boundary in values:
            css = "good-dot" if said.tone != "bad" or boundary in set(trained) & set(b.fed) else "bad-dot"
            canvas.dot(scale(boundary), y, css, f"boundary {boundary} of {last}", 5.5)
            canvas.text(scale(boundary), y + dy, str(boundary), "tick strong", "middle")


def _spread(positions: list[float], gap: float) -> list[float]:
    """Move labels apart that would overlap, keeping their order."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = list(positions)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    return moved
