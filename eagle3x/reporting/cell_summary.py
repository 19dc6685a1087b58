"""A cell's artifacts, read into the records of a summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.reporting.cell import Cell
from eagle3x.reporting.confounders import Confounder
from eagle3x.reporting.curves import Curves, read_curves
from eagle3x.reporting.summary import (
    STAGES,
    Boundaries,
    CellSummary,
    IdenticalOutputs,
    Measurement,
    Rates,
    Replay,
    Sampled,
    SpeedUp,
    StageCost,
)
from eagle3x.types import EagleError


def summarize_cell(cell: Cell, label: str, found: tuple[Confounder, ...]) -> CellSummary:
    """Read a cell's artifacts. The cell must be without credentials already."""
    measured = None if cell.error is not None or cell.benchmark_dir is None else _measurement(cell, cell.benchmark_dir)
    diagnosis = None if cell.diagnosis_dir is None else _diagnosis(cell, cell.diagnosis_dir)
    error = cell.error
    if measured is None and diagnosis is None and error is None:
        error = "no benchmark was made"
    return CellSummary(
        name=cell.name,
        label=label,
        status="ok" if error is None else "failed",
        error=error,
        overrides=cell.overrides,
        measured=measured,
        diagnosis=diagnosis,
        stages=_stages(cell),
        curves=_curves(cell.training_metrics),
        confounders=found,
        sources=cell.sources,
        config=cell.config,
    )


def _curves(metrics: Path | None) -> Curves | None:
    """A pretrained drafter's artifact has no metrics."""
    return read_curves(metrics) if metrics is not None and metrics.is_file() else None


def _measurement(cell: Cell, directory: Path) -> Measurement:
    path = directory / "cell.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return _parse(record, cell)
    except (OSError, KeyError, TypeError, ValueError) as e:
        raise EagleError(f"cannot read the benchmark of cell {cell.name}, {path}: {type(e).__name__}: {e}") from e


def _diagnosis(cell: Cell, directory: Path) -> dict[str, Any]:
    path = directory / "diagnosis.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise EagleError(f"cannot read the diagnosis of cell {cell.name}, {path}: {e}") from e


def _parse(record: Mapping[str, Any], cell: Cell) -> Measurement:
    bounds = record["boundaries"]
    same = record["identical_outputs"]
    return Measurement(
        requests=record["requests"],
        num_speculative_tokens=record["num_speculative_tokens"],
        topk=record["topk"],
        drafts=record["drafts"],
        confidence=cell.config["benchmark"]["confidence"],
        tau=_interval(record["tau"]),
        tau_without_degenerate=_maybe(record["tau_without_degenerate"]),
        degenerate_requests=record["degenerate_requests"],
        tau_macro=record["macro"],
        survival=tuple(_interval(s) for s in record["survival"]),
        alpha=tuple(_maybe(a) for a in record["alpha"]),
        sampled=tuple(_sampled(s) for s in record.get("sampled", ())),  # absent: made before there was more than T = 0
        slot_use=record["slot_use"],
        draft_efficiency=record["draft_efficiency"],
        per_category={name: _interval(v) for name, v in record["per_category"].items()},
        speedup={c: _speedup(s) for c, s in (record["speedup"] or {}).items()},
        identical_outputs=None
        if same is None
        else IdenticalOutputs(same["rate"], same["lossy"], tuple(same["differences"])),
        replay=None if record["replay"] is None else _replay(record["replay"]),
        boundaries=Boundaries(
            trained=None if bounds["trained"] is None else tuple(bounds["trained"]),
            predicted=tuple(bounds["predicted"]),
            num_blocks=bounds["num_blocks"],
            capture_probe=cell.capture_probe,
            serve_probe=bounds["serve_probe"],
        ),
        mismatched=record["mismatched"],
        engine=record["engine"],
    )


def _speedup(record: Mapping[str, Any]) -> SpeedUp:
    def rates(side: Literal["baseline", "drafter"]) -> Rates:
        found = record["rates"][side]
        return Rates(_interval(found["decode_per_request"]), _interval(found["end_to_end"]))

    return SpeedUp(
        decode=_interval(record["decode"]),
        end_to_end=_interval(record["end_to_end"]),
        tau=record["tau"],
        prompts=record["prompts"],
        rates={"baseline": rates("baseline"), "drafter": rates("drafter")},
    )


def _sampled(record: Mapping[str, Any]) -> Sampled:
    return Sampled(
        temperature=record["temperature"],
        top_p=record["top_p"],
        requests=record["requests"],
        tau=_interval(record["tau"]),
        survival=tuple(_interval(s) for s in record["survival"]),
    )


def _replay(record: Mapping[str, Any]) -> Replay:
    return Replay(
        requests=record["requests"],
        identical_counters=record["identical_counters"],
        differences=tuple(record["differences"]),
        tau=_interval(record["tau"]),
        survival=tuple(record["survival"]),
        paired_diff=_interval(record["paired_diff"]),
        verdict=record["verdict"],
        sentence=record["sentence"],
        prompts_needed=record["prompts_needed"],
        candidates=dict(record["candidates"]),
    )


def _stages(cell: Cell) -> dict[str, StageCost]:
    ordered = sorted(cell.manifests, key=lambda s: (STAGES.index(s) if s in STAGES else len(STAGES), s))
    return {
        name: StageCost(
            wall_seconds=cell.manifests[name]["wall_seconds"],
            tokens=cell.manifests[name].get("facts", {}).get("tokens"),
            key=cell.manifests[name]["key"],
            reused=cell.reused[name],
        )
        for name in ordered
    }


def _interval(record: Mapping[str, float]) -> Interval:
    return Interval(record["value"], record["low"], record["high"])


def _maybe(record: Mapping[str, float] | None) -> Interval | None:
    return None if record is None else _interval(record)
