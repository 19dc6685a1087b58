"""The report's tables, built once; HTML, Markdown, the terminal and W&B only render them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.reporting.controls import controls_table
from eagle3x.reporting.diagnosis import diagnosis_tables
from eagle3x.reporting.entries import Entry, Table, p_value, with_interval
from eagle3x.reporting.seed_tables import recipe_comparisons_table, recipes_table
from eagle3x.reporting.sources import Source
from eagle3x.reporting.summary import CellSummary, Measurement, Summary
from eagle3x.reporting.words import MINUS, NONE, count, figure, minus, numbers, percent, seconds, times

MOST_ROWS = 40
"""Listed differences beyond this stay in summary.json."""


def all_tables(summary: Summary) -> list[Table]:
    """Every table that has rows, in reading order."""
    tables = [
        controls_table(summary),
        *diagnosis_tables(summary),
        cells_table(summary),
        recipes_table(summary),
        recipe_comparisons_table(summary),
        acceptance_table(summary),
        speed_table(summary),
        temperatures_table(summary),
        comparisons_table(summary),
        confounders_table(summary),
        categories_table(summary),
        boundaries_table(summary),
        candidates_table(summary),
        replay_table(summary),
        replay_differences_table(summary),
        outputs_table(summary),
        sources_table(summary),
        stages_table(summary),
    ]
    return [t for t in tables if t.rows]


def cells_table(summary: Summary) -> Table:
    """One row per cell: the figures that matter."""
    headers = (
        "cell", "boundaries", "τ, tokens per step", "τ without loops", "τ by replay", "replay = engine, requests",
        "decode speed-up", "end-to-end speed-up", "identical outputs",
    )  # fmt: skip
    return Table("cells", "Cells", "Intervals in brackets.", headers, tuple(_cell_row(c) for c in summary.cells))


def acceptance_table(summary: Summary) -> Table:
    """Acceptance by position, and the other ways in which the field tells it."""
    measured = summary.measured
    positions = max((m.num_speculative_tokens for _, m in measured), default=0)
    rows = [
        (
            Entry(c.label),
            Entry(str(m.requests), note=f"{count(m.degenerate_requests, 'loop')} among them"),
            *(_share(m.survival[i]) if i < len(m.survival) else Entry(NONE) for i in range(positions)),
            *(_share(m.alpha[i]) if i < len(m.alpha) else Entry(NONE) for i in range(1, positions)),
            Entry(f"{m.tau_macro:.2f}"),
            Entry(percent(m.draft_efficiency, 1)),
            Entry(percent(m.slot_use, 1)),
        )
        for c, m in measured
    ]
    survival = [f"survival at position {i}" for i in range(1, positions + 1)]
    alpha = [f"of those at {i}" for i in range(2, positions + 1)]
    headers = ("cell", "requests", *survival, *alpha, "τ, mean of requests", "draft efficiency", "slot use")
    note = "Survival: shares of verify steps. Of those at i: where the drafts before position i were accepted (alpha)."
    return Table("acceptance", "Acceptance in detail", note, headers, tuple(rows))


def speed_table(summary: Summary) -> Table:
    """Tokens per second with and without the drafter."""
    rows = [
        (
            Entry(c.label),
            Entry(concurrency),
            Entry(str(s.prompts)),
            *(
                with_interval(figure(rate, 1))
                for side in ("baseline", "drafter")
                for rate in (s.rates[side].decode_per_request, s.rates[side].end_to_end)
            ),
            Entry(NONE if s.step_cost is None else f"{s.step_cost:.2f}"),
        )
        for c, m in summary.measured
        for concurrency, s in m.speedup.items()
    ]
    headers = (
        "cell", "concurrency", "prompts", "a request, without", "the engine, without", "a request, with",
        "the engine, with", "step cost",
    )  # fmt: skip
    note = (
        "Tokens per second: of a request while it decodes, and of the engine over all of them, without and with the"
        " drafter. Step cost: a verify step with its drafts, in plain steps."
    )
    return Table("speed", "Speed", note, headers, tuple(rows))


def temperatures_table(summary: Summary) -> Table:
    """τ by temperature, of the cells that were measured above 0."""
    positions = max((len(m.survival) for _, m in summary.measured), default=0)
    rows = [
        (
            Entry(c.label),
            Entry(f"{temperature:g}"),
            Entry(f"{top_p:g}"),
            with_interval(figure(tau)),
            *(_share(survival[i]) if i < len(survival) else Entry(NONE) for i in range(positions)),
        )
        for c, m in summary.measured
        if m.sampled
        for temperature, top_p, tau, survival in (
            (0.0, 1.0, m.tau, m.survival),
            *((s.temperature, s.top_p, s.tau, s.survival) for s in m.sampled),
        )
    ]
    survival = [f"survival at position {i}" for i in range(1, positions + 1)]
    headers = ("cell", "temperature", "top-p", "τ, tokens per step", *survival)
    note = (
        "Drafts are the drafter's most likely tokens at every temperature, accepted as often as the target says them."
    )
    return Table("temperatures", "Acceptance by temperature", note, headers, tuple(rows))


def comparisons_table(summary: Summary) -> Table:
    """Paired differences between cells."""
    rows = [
        (
            Entry(f"{summary.label(p.cell)} {MINUS} {summary.label(p.baseline)}"),
            Entry(", ".join(p.swept) or NONE, "code"),
            Entry(str(p.prompts)),
            with_interval(figure(p.difference, 3, True)),
            with_interval(figure(p.replay_difference, 3, True)),
            Entry(f"{p.detectable:.3f}"),
            Entry(p_value(p.p_holm)),
            Entry(minus(p.verdict)),
        )
        for p in summary.comparisons
    ]
    headers = (
        "cells", "swept", "prompts", "difference of τ", "replay predicts", "smallest detectable", "p (Holm)", "verdict",
    )  # fmt: skip
    note = "Paired by prompt; p-values are adjusted for all comparisons in this table."
    return Table("comparison-table", "Paired differences of τ", note, headers, tuple(rows))


def confounders_table(summary: Summary) -> Table:
    """In what compared cells differ beyond what was swept."""
    rows = [
        (
            Entry(f"{summary.label(p.cell)} {MINUS} {summary.label(p.baseline)}"),
            Entry(c.key, "code"),
            Entry(_plain(c.values[0])),
            Entry(_plain(c.values[1])),
        )
        for p in summary.comparisons
        for c in p.confounders
    ]
    note = "These cells differ in more than what was swept on purpose: a difference may come from here."
    return Table("confounders", "Declared confounders", note, ("cells", "key", "first", "second"), tuple(rows))


def categories_table(summary: Summary) -> Table:
    """τ by category of prompts."""
    measured = summary.measured
    names = sorted({n for _, m in measured for n in m.per_category})
    rows = [(Entry(n), *(Entry(figure(m.per_category.get(n))) for _, m in measured)) for n in names]
    headers = ("category", *(c.label for c, _ in measured))
    return Table("category-table", "τ by category", "Tokens per verify step.", headers, tuple(rows))


def boundaries_table(summary: Summary) -> Table:
    """Boundaries and what the probes said of them."""
    rows = [
        (
            Entry(c.label),
            Entry("not known" if m.boundaries.trained is None else numbers(m.boundaries.trained)),
            Entry(numbers(m.boundaries.predicted)),
            match(m),
            Entry(probe_text(m.boundaries.capture_probe)),
            Entry(probe_text(m.boundaries.serve_probe)),
        )
        for c, m in summary.measured
    ]
    headers = ("cell", "trained on", "predicted to be fed", "so", "capture probe", "serve probe")
    note = (
        "The capture probe compares the extraction's tensors with a float32 reference;"
        " the serve probe compares the engine's counters with replay."
    )
    return Table("boundary-table", "Boundaries", note, headers, tuple(rows))


def candidates_table(summary: Summary) -> Table:
    """What replay predicts for other boundaries."""
    rows = [
        (Entry(c.label), Entry(name, note=numbers(value["boundaries"])), _replayed(value), with_interval(figure(m.tau)))
        for c, m in summary.measured
        if m.replay
        for name, value in m.replay.candidates.items()
    ]
    note = "Acceptance length that replay predicts if the engine fed these boundaries; b are those that it is fed."
    return Table(
        "candidates", "If the layers were wrong", note, ("cell", "fed", "τ by replay", "τ measured"), tuple(rows)
    )


def outputs_table(summary: Summary) -> Table:
    """Outputs that differ with and without the drafter."""
    listed = [(c.label, d) for c, m in summary.measured for d in _differences(m)]
    note = "At temperature 0 both may part only where the target's two best tokens are nearly tied."
    return _listing("outputs", "Outputs that differ with the drafter", note, listed)


def replay_table(summary: Summary) -> Table:
    """The engine against replay."""
    rows = [
        (
            Entry(c.label),
            Entry(f"{m.replay.identical_counters} of {m.replay.requests}"),
            with_interval(figure(m.replay.paired_diff, 4, True)),
            Entry(
                m.replay.verdict, note=f"{m.replay.prompts_needed} prompts needed" if m.replay.prompts_needed else ""
            ),
        )
        for c, m in summary.measured
        if m.replay
    ]
    headers = ("cell", "requests with equal counters", "τ served - τ replayed", "verdict")
    return Table("replay", "Engine against replay", "Paired by prompt.", headers, tuple(rows))


def replay_differences_table(summary: Summary) -> Table:
    """Requests whose counters differ from replay's."""
    listed = [(c.label, d) for c, m in summary.measured if m.replay for d in m.replay.differences]
    note = "Counters are verify steps, then accepted at each position; gaps are the smallest top-2 logit gaps."
    return _listing("replay-differences", "Requests in which replay and engine differ", note, listed)


def sources_table(summary: Summary) -> Table:
    """Whose target, drafter and prompts these are."""
    users: dict[Source, list[str]] = {}
    for cell in summary.cells:
        for source in cell.sources:
            users.setdefault(source, []).append(cell.label)
    rows = [
        (
            Entry(source.what),
            Entry(source.place),
            Entry(source.revision or NONE, "code"),
            Entry(source.licence or "not said", "" if source.licence else "quiet"),
            Entry("all" if len(labels) == len(summary.cells) else ", ".join(labels)),
        )
        for source, labels in users.items()
    ]
    headers = ("source", "place", "revision", "licence", "cells")
    return Table("sources", "Sources", "Licences as their cards say them.", headers, tuple(rows))


def stages_table(summary: Summary) -> Table:
    """Artifacts, their keys and their cost."""
    rows = [
        (
            Entry(f"{c.label}: {name}" if len(summary.cells) > 1 else name),
            Entry(seconds(s.wall_seconds)),
            Entry(NONE if s.tokens is None else f"{s.tokens:,}"),
            Entry("reused" if s.reused else "made here", "quiet" if s.reused else ""),
            Entry(s.key[:16], "code"),
        )
        for c in summary.cells
        for name, s in c.stages.items()
    ]
    headers = ("stage", "wall time to make it", "tokens", "in this run", "artifact key")
    return Table("stages", "Stages", "Full keys are in summary.json.", headers, tuple(rows))


def probe_text(probe: dict[str, Any] | None) -> str:
    """A probe's verdict in one line."""
    if probe is None:
        return "not run"
    found = probe.get("found")
    return probe.get("sentence") or (probe["verdict"] if found is None else f"{probe['verdict']}: {numbers(found)}")


def _cell_row(c: CellSummary) -> tuple[Entry, ...]:
    m = c.measured
    if m is None:
        said = Entry("failed", "bad") if c.status == "failed" else Entry("not served", "quiet")
        return (Entry(c.label), said, *(Entry(NONE, "quiet") for _ in range(7)))
    replay, same = m.replay, m.identical_outputs
    agreed = Entry("does not apply", "quiet")
    if replay is not None:
        agreed = Entry(f"{replay.identical_counters} of {replay.requests}", note=replay.verdict)
    return (
        Entry(c.label),
        match(m),
        with_interval(figure(m.tau)),
        with_interval(figure(m.tau_without_degenerate)),
        with_interval(figure(replay.tau if replay else None)),
        agreed,
        *_speed_entries(m),
        Entry("not compared", "quiet")
        if same is None
        else Entry(rate(same.rate), note=f"{len(same.differences)} listed below" if same.differences else ""),
    )


def _differences(m: Measurement) -> tuple[dict[str, Any], ...]:
    return m.identical_outputs.differences if m.identical_outputs is not None else ()


def _share(i: Interval | None) -> Entry:
    if i is None:
        return Entry(NONE)
    return Entry(percent(i.value, 1), note=f"[{percent(i.low, 1)}, {percent(i.high, 1)}]")


def rate(share: float) -> str:
    """Of identical outputs: `100 %` only if it is."""
    return percent(share, 0 if share == 1 else 1)


def _speed_entries(m: Measurement) -> tuple[Entry, Entry]:
    if not m.speedup:
        return Entry("not measured", "quiet"), Entry("not measured", "quiet")
    if len(m.speedup) == 1 and "1" in m.speedup:
        return with_interval(times(m.speedup["1"].decode)), with_interval(times(m.speedup["1"].end_to_end))
    return (
        Entry("; ".join(f"{times(s.decode)} at concurrency {c}" for c, s in m.speedup.items())),
        Entry("; ".join(f"{times(s.end_to_end)} at concurrency {c}" for c, s in m.speedup.items())),
    )


def match(m: Measurement) -> Entry:
    """Whether the engine feeds the drafter what it was trained on."""
    if m.boundaries.contradiction:
        return Entry("contradicted", "bad")
    if m.mismatched is None:
        return Entry("not known", "quiet")
    return Entry("mismatched", "bad") if m.mismatched else Entry("matched", "good")


def _listing(id_: str, title: str, note: str, listed: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    columns = list(dict.fromkeys(k for _, d in listed for k in d))
    rows = [(Entry(cell), *(Entry(_plain(d.get(k))) for k in columns)) for cell, d in listed[:MOST_ROWS]]
    if len(listed) > MOST_ROWS:
        note = f"{note} The first {MOST_ROWS} of {len(listed)}; all are in summary.json.".strip()
    return Table(id_, title, note, ("cell", *(k.replace("_", " ") for k in columns)), tuple(rows))


def _replayed(value: dict[str, Any]) -> Entry:
    return with_interval(figure(Interval(value["value"], value["low"], value["high"])))


def _plain(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return minus(f"{value:.4g}")
    if isinstance(value, str | int):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
