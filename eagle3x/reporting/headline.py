"""The one sentence that matters."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3x.reporting.recipes import Recipe
from eagle3x.reporting.summary import CellSummary, Measurement, PairedDifference
from eagle3x.reporting.verdict import sweep_verdict, verdict
from eagle3x.reporting.words import count, figure, first_line, minus, times


def headline(
    cells: Sequence[CellSummary], comparisons: Sequence[PairedDifference], recipes: Sequence[Recipe] = ()
) -> str:
    """One sentence about one cell, or about a matrix: its best cell, or the best recipe if seeds were pooled."""
    if len(cells) == 1:
        cell = cells[0]
        said = [] if cell.diagnosis is None else [verdict(cell.diagnosis, cell.measured is not None)]
        if cell.measured is None and not said:
            return _failure(cell)
        return "; ".join([*said, *([] if cell.measured is None else [_one(cell.measured)])])
    measured = [(c, c.measured) for c in cells if c.measured is not None]
    diagnosed = [(c.label, c.diagnosis) for c in cells if c.diagnosis is not None]
    failed = [c for c in cells if c.status == "failed"]
    if len(failed) == len(cells) and not diagnosed:
        return f"All {len(cells)} cells failed; the first: {_failure(cells[0])}"
    parts = [sweep_verdict(diagnosed)] if diagnosed else []
    if measured:
        best = _best_recipe(recipes) if recipes else _best(measured)
        parts += [best[0].lower() + best[1:] if parts else best, *_wrong(measured, comparisons)]
    contradicted = [c.label for c, m in measured if m.boundaries.contradiction]
    if contradicted:
        parts.append(f"the serve probe contradicts the predicted boundaries in “{'”, “'.join(contradicted)}”")
    if failed:
        parts.append(f"{len(failed)} of {len(cells)} cells failed; the first: {_failure(failed[0])}")
    return "; ".join(parts)


def extra(m: Measurement) -> str:
    """What tau is worth, in plain words."""
    return f"{m.tau.value - 1:.2f} extra tokens per verify step"


def agreement(m: Measurement) -> str:
    """Engine against replay, in plain words."""
    if m.replay is None:
        return "replay does not apply to this cell"
    return f"replay agrees with the engine in {m.replay.identical_counters} of {m.replay.requests} requests"


def speed(m: Measurement, concurrency: str) -> str:
    """The decode speed-up and what explains it."""
    decode = m.speedup[concurrency].decode
    step = m.speedup[concurrency].step_cost
    cost = "" if step is None else f": a verify step with its drafts costs {step:.2f} plain steps here"
    at = "" if concurrency == "1" else f" at concurrency {concurrency}"
    if decode.contains(1):
        return f"no speed-up shown{at}, {times(decode)}{cost}"
    return f"{'speed-up' if decode.low > 1 else 'slow-down'} {times(decode)}{at}{cost}"


def _one(m: Measurement) -> str:
    parts = [f"tau {figure(m.tau)} on {count(m.requests, 'prompt')}: {extra(m)}"]
    if m.mismatched:
        parts.append("MISMATCHED: the engine is fed other boundaries than the drafter was trained on")
    if m.boundaries.contradiction:
        parts.append(f"serve probe: {m.boundaries.contradiction}")
    parts.append(agreement(m))
    parts.append(speed(m, next(iter(m.speedup))) if m.speedup else "speed not measured")
    return "; ".join(parts)


def _best(measured: Sequence[tuple[CellSummary, Measurement]]) -> str:
    cell, m = max(measured, key=lambda pair: pair[1].tau.value)
    return f"Highest tau {figure(m.tau)} on {count(m.requests, 'prompt')}, in cell “{cell.label}”: {extra(m)}"


def _best_recipe(recipes: Sequence[Recipe] = ()) -> str:
    """A single seed is not set above the mean of several, so that luck is not the headline."""
    best = max(recipes, key=lambda r: r.tau.value)
    said = f"tau {figure(best.tau)} over {len(best.seeds)} seeds and {count(best.prompts, 'prompt')}"
    parts = f"other seeds ±{best.by_seeds:.2f}, other prompts ±{best.by_prompts.half_width:.2f}"
    if len(recipes) == 1:
        return f"{said} ({parts}): {best.tau.value - 1:.2f} extra tokens per verify step"
    return f"Highest {said} ({parts}), of recipe “{best.label}”: {best.tau.value - 1:.2f} extra tokens per verify step"


def _wrong(measured: Sequence[tuple[CellSummary, Measurement]], comparisons: Sequence[PairedDifference]) -> list[str]:
    wrong = {c.name for c, m in measured if m.mismatched}
    if not wrong:
        return []
    said = f"{len(wrong)} of {count(len(measured), 'cell')} {'is' if len(wrong) == 1 else 'are'} mismatched"
    pairs = [p for p in comparisons if p.cell in wrong and p.baseline not in wrong]
    if not pairs:
        return [said]
    losses = sorted(p.difference.value for p in pairs)
    said += f" and tau changes there by {_span(losses)}"
    predicted = sorted(p.replay_difference.value for p in pairs if p.replay_difference is not None)
    if len(predicted) == len(losses):
        said += f" (replay predicts {_span(predicted)})"
    return [said]


def _span(values: Sequence[float]) -> str:
    low, high = minus(f"{values[0]:+.2f}"), minus(f"{values[-1]:+.2f}")
    return low if low == high else f"{low} to {high}"


def _failure(cell: CellSummary) -> str:
    return f"cell “{cell.label}” failed: {first_line(cell.error or '')}"
