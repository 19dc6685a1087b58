"""What a diagnosis says: the sentence, its tables, and the ladder as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3x.benchmark.statistics import Interval
from eagle3x.reporting.entries import Entry, Table, Tone
from eagle3x.reporting.figures import LEFT, RIGHT, WIDTH, Figure
from eagle3x.reporting.summary import CellSummary, Summary
from eagle3x.reporting.svg import Canvas, Scale, fitted, padded
from eagle3x.reporting.words import NONE, figure, minus, numbers

NAMES = {
    "trained": "as trained",
    "exported": "as exported",
    "responses": "on its own text",
    "states": "on its own states",
    "served": "as served",
}
"""Of the rungs: what is added on each."""
SPOKEN = {
    "offset_serving": "wrong layers are fed",
    "offset_training": "it was trained on other layers than it says",
    "columns_swapped": "its layers are read in the wrong order",
    "inputs_swapped": "its attention reads embedding and hidden state the wrong way round",
    "rotary_layout": "its rotary pairs are laid out another way",
    "norm_variant": "a norm option is wrong",
    "random_embedding": "its embedding is not the target's",
    "d2t_missing": "its vocabulary map is missing",
    "d2t_shifted": "its vocabulary map is shifted",
    "stale_vocabulary": "its vocabulary map is another one's",
    "wrong_template": "prompts have another template",
    "max_positions": "its positions end too early",
    "rope_base": "its rotary base is wrong",
    "wrong_algorithm": "the engine does not run EAGLE-3",
    "other_target": "it was made for another target",
    "normed_states": "it is fed normed states",
    "quantized_states": "quantization moves the states",
    "quantized_text": "the quantized target writes other text",
    "attention": "the attention kernels move the states",
    "engine_states": "the serving engine's states differ",
    "other_text": "the served target writes other text",
    "weak_drafter": "the drafter is weak",
    "overfit": "the drafter is weak on text that it was not trained on",
    "export_changed": "the export changed it",
    "unloadable": "the checkpoint cannot be loaded",
    "engine": "the engine accepts less than its states explain",
}
"""What each cause is called."""


def diagnosed(summary: Summary) -> list[tuple[CellSummary, Mapping[str, Any]]]:
    """The cells that have a diagnosis, with it."""
    return [(c, c.diagnosis) for c in summary.cells if c.diagnosis is not None]


def verdict(diagnosis: Mapping[str, Any]) -> str:
    """One sentence: what is wrong and what to change, or that nothing is."""
    causes = diagnosis["causes"]
    if causes:
        said = "; ".join(SPOKEN[c["kind"]] + (f" (tau {_signed(c['lost'])})" if c["lost"] else "") for c in causes)
        first = min(causes, key=lambda c: c["lost"]["value"] if c["lost"] else 0.0)
        return f"Diagnosis: {said}. To change first: {first['repair']}"
    unsure = [step for step in diagnosis["steps"] if step["verdict"] == "cannot tell"]
    if unsure:
        said = "; ".join(f"{NAMES[step['rung']]}: {step['prompts_needed']} prompts needed" for step in unsure)
        return f"Diagnosis: no loss shown, but one that counts might be hidden ({said})"
    climbed = [rung for rung in diagnosis["rungs"] if rung["tau"] is not None]
    first, last = climbed[0], climbed[-1]
    if len(climbed) == 1:
        return f"Diagnosis: only one rung could be climbed, {NAMES[first['name']]}: tau {first['tau']['value']:.2f}"
    return (
        f"Diagnosis: nothing is lost from the drafter {NAMES[first['name']]} (tau {first['tau']['value']:.2f}) to"
        f" {NAMES[last['name']]} ({last['tau']['value']:.2f})"
    )


def diagnosis_tables(summary: Summary) -> list[Table]:
    """Causes first: what is wrong, and what to change."""
    found = diagnosed(summary)
    many = len(summary.cells) > 1
    tables = [_causes(found, many), _ladder(found, many), _grid(found, many), _worth(found, many)]
    return [table for table in tables if table.rows]


def ladder_figure(summary: Summary) -> Figure | None:
    """tau of each rung with its interval; broken rungs are marked. Of one cell: many have the table."""
    found = diagnosed(summary)
    if len(found) != 1:
        return None
    diagnosis = found[0][1]
    rungs = diagnosis["rungs"]
    taus = [Interval(**r["tau"]) for r in rungs if r["tau"] is not None]
    broken = set(diagnosis["broken"])
    scale = Scale(min(1.0, *(t.low for t in taus)), padded(1.0, max(t.high for t in taus))[1], LEFT, RIGHT)
    step, top = 40.0, 14.0
    bottom = top + step * len(rungs)
    canvas = Canvas(WIDTH, bottom + 42)
    for i, rung in enumerate(rungs):
        if rung["name"] in broken:
            canvas.rect(0, top + step * i + 2, WIDTH, step - 4, "wrong-row", radius=6)
    canvas.x_axis(scale, bottom, top, "acceptance length τ, tokens per verify step", 5)
    canvas.line(scale(1), top, scale(1), bottom, "reference")
    above: tuple[float, float] | None = None
    for i, rung in enumerate(rungs):
        y = top + step * (i + 0.5)
        canvas.text(0, y + 4, NAMES[rung["name"]], "name")
        if rung["tau"] is None:
            canvas.text(LEFT, y + 4, fitted(f"skipped: {rung['skipped']}", 58), "note")
            continue
        tau = Interval(**rung["tau"])
        css = f"c{1 if rung['name'] in broken else 0}"
        here = (scale(tau.value), y)
        if above is not None:
            canvas.curve(*above, *here, f"{css} link")
        canvas.line(scale(tau.low), y, scale(tau.high), y, f"{css} bar")
        canvas.dot(*here, f"{css} fill", f"{NAMES[rung['name']]}: τ {figure(tau, 3)}")
        canvas.text(RIGHT + 14, y + 4, figure(tau), "value")
        above = here
    said = "; ".join(f"{NAMES[r['name']]}: {r['tau']['value']:.3f}" for r in rungs if r["tau"] is not None)
    return Figure(
        "ladder",
        "Where acceptance is lost",
        "Each rung changes one thing: the export, the text, the states, the engine. Marked rungs lost acceptance.",
        canvas.render(f"Acceptance length on each rung of the ladder, with interval. {said}."),
    )


def _causes(found: Sequence[tuple[CellSummary, Mapping[str, Any]]], many: bool) -> Table:
    rows = [
        (
            *_label(cell, many),
            Entry(SPOKEN[c["kind"]], "bad"),
            Entry(c["sentence"]),
            _lost(c["lost"]),
            Entry(c["repair"]),
        )
        for cell, diagnosis in found
        for c in diagnosis["causes"]
    ]
    headers = (*_cell_header(many), "what is wrong", "seen in", "change of τ", "what to change")
    note = "Every cause that was found; what two faults on one rung cost together is told as that rung's."
    return Table("causes", "What is wrong, and what to change", note, headers, tuple(rows))


def _ladder(found: Sequence[tuple[CellSummary, Mapping[str, Any]]], many: bool) -> Table:
    rows = []
    for cell, diagnosis in found:
        steps = {step["rung"]: step for step in diagnosis["steps"]}
        for rung in diagnosis["rungs"]:
            step = steps.get(rung["name"])
            rows.append(
                (
                    *_label(cell, many),
                    Entry(NAMES[rung["name"]]),
                    *_step(rung, step),
                    Entry(rung["what"]) if rung["tau"] else Entry(f"skipped: {rung['skipped']}", "quiet"),
                )
            )
    headers = (*_cell_header(many), "rung", "τ", "change of τ", "p (Holm)", "so", "what is replayed or counted")
    note = (
        "Each rung differs from the one above it in one thing, on the same prompts, in this order: what two faults cost"
        " together is told as the first one's. Broken: significant, and at least 0.02 of τ or 5 % of what τ is above 1."
    )
    return Table("ladder-table", "The ladder", note, headers, tuple(rows))


def _step(rung: Mapping[str, Any], step: Mapping[str, Any] | None) -> tuple[Entry, Entry, Entry, Entry]:
    tau = _estimate(rung["tau"], 3)
    if step is None:
        return tau, Entry(NONE), Entry(NONE), Entry("first" if rung["tau"] else NONE, "quiet")
    tones: dict[str, Tone] = {"broken": "bad", "sound": "good", "cannot tell": "quiet"}
    needed = "" if step["prompts_needed"] is None else f"{step['prompts_needed']} prompts needed"
    verdict = Entry(step["verdict"], tones[step["verdict"]], needed if step["verdict"] != "broken" else "")
    return tau, _lost(step["difference"]), Entry(f"{step['p_holm']:.3f}"), verdict


def _grid(found: Sequence[tuple[CellSummary, Mapping[str, Any]]], many: bool) -> Table:
    rows = []
    for cell, diagnosis in found:
        grid = diagnosis["offset_quantization"]
        if grid is None:
            continue
        taus = grid["taus"]
        shifted = f"{numbers(grid['shifted'])}{', hypothetical' if grid['hypothetical'] else ''}"
        rows += [
            (*_label(cell, many), Entry(f"right {numbers(grid['right'])}"), _estimate(taus["right_plain"], 3),
             _estimate(taus["right_served"], 3), _lost(grid["states"])),
            (*_label(cell, many), Entry(f"shifted {shifted}"), _estimate(taus["shifted_plain"], 3),
             _estimate(taus["shifted_served"], 3), Entry(NONE)),
            (*_label(cell, many), Entry("change by the offset"), _lost(grid["offset"]), Entry(NONE),
             _lost(grid["interaction"])),
        ]  # fmt: skip
    headers = (*_cell_header(many), "boundaries", "τ, states as trained", "τ, states as served", "change by the states")
    note = "Offset and states of the served target apart, on identical text; below right is their interaction."
    return Table("grid", "Offset or quantization?", note, headers, tuple(rows))


def _worth(found: Sequence[tuple[CellSummary, Mapping[str, Any]]], many: bool) -> Table:
    rows = []
    for cell, diagnosis in found:
        estimated = diagnosis["estimate"]
        for row in estimated["rows"] if estimated else ():
            pays: Tone = "good" if row["pays"] == "yes" else "bad" if row["pays"] in ("no", "never") else "quiet"
            best = estimated["best"][str(row["batch"])] == row["num_speculative_tokens"]
            rows.append(
                (
                    *_label(cell, many),
                    Entry(f"{row['num_speculative_tokens']}{' (best)' if best else ''}"),
                    Entry(str(row["batch"])),
                    _estimate(row["tau"], 3),
                    _estimate(row["step_cost"]),
                    _estimate(row["speedup"]),
                    Entry(row["pays"], pays),
                )
            )
    headers = (
        *_cell_header(many), "drafts a step", "concurrency", "τ by replay", "break-even τ = step cost",
        "decode speed-up", "pays",
    )  # fmt: skip
    note = "By replay on the kept prompts and the timing pass's step costs; one k was timed, the others lie on a line."
    return Table("worth", "What it would be worth", note, headers, tuple(rows))


def _label(cell: CellSummary, many: bool) -> tuple[Entry, ...]:
    return (Entry(cell.label),) if many else ()


def _cell_header(many: bool) -> tuple[str, ...]:
    return ("cell",) if many else ()


def _estimate(record: Mapping[str, float] | None, digits: int = 2) -> Entry:
    if record is None:
        return Entry(NONE, "quiet")
    value, _, interval = figure(Interval(record["value"], record["low"], record["high"]), digits).partition(" ")
    return Entry(value, note=interval)


def _lost(record: Mapping[str, float] | None) -> Entry:
    if record is None:
        return Entry(NONE, "quiet")
    value, _, interval = figure(Interval(record["value"], record["low"], record["high"]), 3, True).partition(" ")
    return Entry(value, note=interval)


def _signed(record: Mapping[str, float]) -> str:
    return minus(f"{record['value']:+.2f}")
