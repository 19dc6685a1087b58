"""A cell of a comparison, as a run leaves it on disk, so that a sweep's end finds every job whatever launched it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle3x.reporting.masking import masked, masked_strings, masked_text
from eagle3x.reporting.sources import Source
from eagle3x.types import EagleError

RECORD = "cell_record.json"
RECORD_VERSION = 2


@dataclass(frozen=True)
class Cell:
    """One combination of a matrix, done or failed.

    `config` is the resolved config as plain values; `benchmark_dir` the benchmark artifact (None if it failed before),
    `diagnosis_dir` the diagnosis (None if none was asked for).
    `manifests`: stage name -> the artifact's manifest; `reused`: stage name -> whether this run found it finished.
    """

    name: str
    overrides: tuple[str, ...]
    config: dict[str, Any]
    benchmark_dir: Path | None
    diagnosis_dir: Path | None
    manifests: dict[str, dict[str, Any]]
    reused: dict[str, bool]
    training_metrics: Path | None
    capture_probe: dict[str, Any] | None
    sources: tuple[Source, ...]
    error: str | None


def without_credentials(cell: Cell) -> Cell:
    """The cell as it may be shown and stored."""
    return replace(
        cell,
        name=masked_text(cell.name),
        overrides=tuple(masked_text(o) for o in cell.overrides),
        config=masked(cell.config),
        manifests=masked_strings(cell.manifests),
        sources=tuple(replace(s, place=masked_text(s.place)) for s in cell.sources),
        error=None if cell.error is None else masked_text(cell.error),
    )


def save_cell(cell: Cell, run_dir: Path) -> None:
    """Write the cell's record into its run directory, without credentials."""
    cell = without_credentials(cell)
    record = {
        "record_version": RECORD_VERSION,
        "name": cell.name,
        "overrides": list(cell.overrides),
        "config": cell.config,
        "benchmark_dir": _absolute(cell.benchmark_dir),
        "diagnosis_dir": _absolute(cell.diagnosis_dir),
        "manifests": cell.manifests,
        "reused": cell.reused,
        "training_metrics": _absolute(cell.training_metrics),
        "capture_probe": cell.capture_probe,
        "sources": [asdict(s) for s in cell.sources],
        "error": cell.error,
    }
    write_atomically(run_dir / RECORD, json.dumps(record, indent=1) + "\n")


def load_cells(sweep_dir: Path) -> list[Cell]:
    """The cells of all jobs below `sweep_dir`, in the order of their job numbers; none if no job left a record.

    Raises:
        EagleError: a record of another version.
    """
    found = [f for f in sweep_dir.rglob(RECORD) if f.parent != sweep_dir]
    return [_load(f) for f in sorted(found, key=lambda f: _natural(f.relative_to(sweep_dir)))]


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path) -> Cell:
    record: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record.get("record_version") != RECORD_VERSION:
        raise EagleError(
            f"{path} has version {record.get('record_version')}, this eagle3x reads {RECORD_VERSION}: run the job again"
        )
    return Cell(
        name=record["name"],
        overrides=tuple(record["overrides"]),
        config=record["config"],
        benchmark_dir=_path(record["benchmark_dir"]),
        diagnosis_dir=_path(record["diagnosis_dir"]),
        manifests=record["manifests"],
        reused=record["reused"],
        training_metrics=_path(record["training_metrics"]),
        capture_probe=record["capture_probe"],
        sources=tuple(Source(**s) for s in record["sources"]),
        error=record["error"],
    )


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Job 10 comes after job 9."""
    parts = re.split(r"(\d+)", str(path.parent))
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]
