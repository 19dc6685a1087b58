"""What a run has shown, as frozen records, and their JSON: summary.json (docs/summary.md documents the schema)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.diagnosis.planted import Fault, called
from eagle3x.reporting.confounders import Confounder
from eagle3x.reporting.curves import Curves
from eagle3x.reporting.recipes import Recipe, RecipeDifference
from eagle3x.reporting.sources import Source

SCHEMA_VERSION = 1
STAGES = ("prompts", "responses", "hidden_states", "drafter", "export", "benchmark", "diagnose")


@dataclass(frozen=True)
class Rates:
    """Tokens per second: of one request while it decodes, and of the engine from the first request to the last."""

    decode_per_request: Interval
    end_to_end: Interval


@dataclass(frozen=True)
class SpeedUp:
    """Time without the drafter / time with it, for the same number of output tokens. Above 1 is faster.

    `tau`: acceptance length of the timing pass itself, whose texts do not stop; None if the engine gives no totals.
    `rates`: tokens per second of both sides.
    """

    decode: Interval
    end_to_end: Interval
    tau: float | None
    prompts: int
    rates: dict[Literal["baseline", "drafter"], Rates]

    @property
    def step_cost(self) -> float | None:
        """What a verify step with its drafts costs, in plain decode steps: tau / decode speed-up."""
        return None if self.tau is None else self.tau / self.decode.value


@dataclass(frozen=True)
class IdenticalOutputs:
    """Share of greedy outputs that are the same with and without the drafter, and each that is not.

    `lossy`: differences that no near-tie explains.
    """

    rate: float
    lossy: int
    differences: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Replay:
    """The engine's counters against replay's, request by request.

    `tau`, `survival`: what replay predicts. `paired_diff`: tau served - tau replayed.
    `candidates`: tau that replay predicts for other boundaries. `prompts_needed`: only if the verdict is `cannot tell`.
    """

    requests: int
    identical_counters: int
    differences: tuple[dict[str, Any], ...]
    tau: Interval
    survival: tuple[float, ...]
    paired_diff: Interval
    verdict: str
    sentence: str
    prompts_needed: int | None
    candidates: dict[str, Any]


@dataclass(frozen=True)
class Boundaries:
    """Residual-stream boundaries the drafter was trained on, and those it is predicted to be fed; ascending.

    `trained`: None for a drafter of which nobody knows. `num_blocks`: the target's n; boundaries are in 0..n.
    """

    trained: tuple[int, ...] | None
    predicted: tuple[int, ...]
    num_blocks: int
    capture_probe: dict[str, Any] | None
    serve_probe: dict[str, Any] | None

    @property
    def contradiction(self) -> str | None:
        """The serve probe's sentence if the engine's counters are those of other boundaries than predicted."""
        probe = self.serve_probe
        return probe["sentence"] if probe is not None and probe["verdict"] == "wrong" else None

    @property
    def fed(self) -> tuple[int, ...]:
        """As predicted, or as the serve probe found if it contradicts."""
        probe = self.serve_probe
        return tuple(probe["fed"]) if probe is not None and self.contradiction else self.predicted


@dataclass(frozen=True)
class Sampled:
    """Acceptance at a temperature above 0."""

    temperature: float
    top_p: float
    requests: int
    tau: Interval
    survival: tuple[Interval, ...]


@dataclass(frozen=True)
class Measurement:
    """The figures of a cell whose benchmark is done. tau is in tokens per verify step, bonus token included."""

    requests: int
    num_speculative_tokens: int
    topk: int
    drafts: int
    confidence: float
    tau: Interval
    tau_without_degenerate: Interval | None
    degenerate_requests: int
    tau_macro: float
    survival: tuple[Interval, ...]
    alpha: tuple[Interval | None, ...]
    sampled: tuple[Sampled, ...]
    slot_use: float
    draft_efficiency: float | None
    per_category: dict[str, Interval]
    speedup: dict[str, SpeedUp]
    """By concurrency; empty without a timing pass."""
    identical_outputs: IdenticalOutputs | None
    """None: the target was not served without the drafter."""
    replay: Replay | None
    boundaries: Boundaries
    mismatched: bool | None
    """Fed other boundaries than trained on; None where that is not known."""
    engine: dict[str, Any]
    """Identity of the serving engine: name, version, dtype, device, ..."""


@dataclass(frozen=True)
class StageCost:
    """A stage's artifact. `wall_seconds` is what making it took, in this run or, if `reused`, in an earlier one."""

    wall_seconds: float
    tokens: int | None
    key: str
    reused: bool


@dataclass(frozen=True)
class CellSummary:
    """One cell. `measured` is None if it failed; `confounders`: against the cell it is compared with first.

    `label`: a short name, by what was swept.
    """

    name: str
    label: str
    status: Literal["ok", "failed"]
    error: str | None
    overrides: tuple[str, ...]
    measured: Measurement | None
    diagnosis: dict[str, Any] | None
    """The content of diagnosis.json (docs/diagnosis.md); None if none was asked for."""
    stages: dict[str, StageCost]
    curves: Curves | None
    confounders: tuple[Confounder, ...]
    sources: tuple[Source, ...]
    config: dict[str, Any]


@dataclass(frozen=True)
class PairedDifference:
    """tau(cell) - tau(baseline) on the same prompts, and what replay says that it should be.

    `detectable`: smallest difference that this many prompts show with 80 % power; `p_holm`: adjusted for all pairs.
    """

    cell: str
    baseline: str
    swept: tuple[str, ...]
    prompts: int
    difference: Interval
    replay_difference: Interval | None
    detectable: float
    p_value: float
    p_holm: float
    verdict: str
    confounders: tuple[Confounder, ...]


@dataclass(frozen=True)
class Control:
    """A cell in which something is broken on purpose, or nothing.

    planted: faults. named: kinds of causes, with the sentence of each. rungs: where the ladder lost it. tau_lost: the
    paired difference to the cell in which nothing is planted, None without one; predicted: the same by replay.
    """

    cell: str
    planted: tuple[Fault, ...]
    named: tuple[str, ...]
    sentences: tuple[str, ...]
    rungs: tuple[str, ...]
    tau_lost: Interval | None
    predicted: Interval | None

    @property
    def right(self) -> bool:
        """Whether exactly what was planted is named; of a fault that shares its kind, in the words that are its own."""
        wanted = [called(fault) for fault in self.planted]
        said = [(kind, part) for kind, s in zip(self.named, self.sentences, strict=True) for part in s.split("; ")]
        return {w.kind for w in wanted} == set(self.named) and all(
            any(kind == w.kind and part.startswith(w.said) for kind, part in said) for w in wanted
        )


@dataclass(frozen=True)
class Summary:
    """A whole run: one cell, or all cells of a matrix with their comparisons. `headline` is the one sentence.

    `recipes`: cells that differ in their seed alone, pooled.
    """

    created: str
    command: str
    headline: str
    cells: tuple[CellSummary, ...]
    comparisons: tuple[PairedDifference, ...]
    recipes: tuple[Recipe, ...]
    recipe_comparisons: tuple[RecipeDifference, ...]
    controls: tuple[Control, ...]

    @property
    def measured(self) -> list[tuple[CellSummary, Measurement]]:
        """The cells that have figures, with them."""
        return [(c, c.measured) for c in self.cells if c.measured is not None]

    def label(self, name: str) -> str:
        """The short name of the cell called `name`."""
        return next(c.label for c in self.cells if c.name == name)

    def to_json(self) -> dict[str, Any]:
        """summary.json: a cell's figures are flat, null for a failed cell; configs and curves are elsewhere."""
        return {
            "schema_version": SCHEMA_VERSION,
            "created": self.created,
            "command": self.command,
            "headline": self.headline,
            "cells": [_cell_json(c) for c in self.cells],
            "comparisons": [asdict(c) for c in self.comparisons],
            "recipes": [asdict(r) for r in self.recipes],
            "recipe_comparisons": [asdict(d) for d in self.recipe_comparisons],
            "controls": [{**asdict(c), "right": c.right} for c in self.controls],
        }

    def dumps(self) -> str:
        """The text of summary.json. Raises ValueError on NaN or infinity: a figure that is undefined is null."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False, default=str) + "\n"


def _cell_json(cell: CellSummary) -> dict[str, Any]:
    names = [f.name for f in fields(Measurement)]
    figures = dict.fromkeys(names) if cell.measured is None else asdict(cell.measured)
    replay = figures["replay"]
    figures["tau_replay"] = None if replay is None else replay["tau"]
    return {
        "name": cell.name,
        "label": cell.label,
        "status": cell.status,
        "error": cell.error,
        "overrides": list(cell.overrides),
        **figures,
        "diagnosis": cell.diagnosis,
        "stages": {name: asdict(s) for name, s in cell.stages.items()},
        "confounders": [asdict(c) for c in cell.confounders],
        "sources": [asdict(s) for s in cell.sources],
    }
