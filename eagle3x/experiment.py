"""One cell from config to report, and the comparison of a multirun's cells."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from eagle3x import pipeline, preflight, targets
from eagle3x.artifacts import Artifact, Store
from eagle3x.composition import Cell
from eagle3x.drafters import location
from eagle3x.progress import log
from eagle3x.quantization.stored import quantization_config, stored_as
from eagle3x.types import ConfigError, EagleError

REPORTED = ("diagnose", "report")
"""Stages whose runs leave a report."""


def run_experiment(cell: Cell, run_dir: Path, in_sweep: bool, command: str) -> None:
    """Make what is missing, then report. A failed cell is reported as failed, and its error raised.

    Raises:
        EagleError: a stage could not be finished; what was finished before stays in the store. Or what is diagnosed
            failed to be served: the report's sentence, which says what was shown nevertheless.
    """
    cfg = cell.config
    store = Store(Path(cfg.artifacts))
    made: dict[str, Artifact] = {}
    target: targets.Target | None = None
    error: BaseException | None = None
    not_served = False
    try:
        target = targets.resolve(cfg.target)
        if quantization_config(target):
            log(f"target {target.name}: stored as {stored_as(target)}")
        if "drafter" in pipeline.plan(cfg.stage, cfg):
            location.resolve(cfg.drafter)
        preflight.check_with_target(cfg, target)
        unserved = preflight.unserved(cfg, target) if cfg.stage == "diagnose" else None
        missing = {} if unserved is None else {"benchmark": unserved}
        for artifact in pipeline.run(cfg.stage, cfg, cell.snapshot, target, store, missing):
            made[artifact.stage] = artifact
        if unserved is None and "benchmark" in missing:  # not refused beforehand, but tried
            not_served, error = True, EagleError(missing["benchmark"])
    except ConfigError:
        raise
    except Exception as e:
        error = e
    if cfg.stage in REPORTED:
        sentence = report_cell(cell, run_dir, target, made, error, in_sweep, command)
        if not_served:
            raise EagleError(sentence)
    if error is not None:
        raise error
    if cfg.stage not in REPORTED:
        log(f"{cfg.stage}: {made[cfg.stage].path}")


def report_cell(
    cell: Cell,
    run_dir: Path,
    target: targets.Target | None,
    made: Mapping[str, Artifact],
    error: BaseException | None,
    in_sweep: bool,
    command: str,
) -> str:
    """Write report.html, report.md, summary.json and the W&B run of one cell; its headline.

    target: None if it could not be had.
    """
    from eagle3x.reporting import report
    from eagle3x.reporting.sources import sources_of

    prompts = made["prompts"].manifest.facts if "prompts" in made else {}
    drafter, states, benchmark = made.get("drafter"), made.get("hidden_states"), made.get("benchmark")
    diagnosis = made.get("diagnose")
    record = report.Cell(
        name=" ".join(cell.overrides) or "default",
        overrides=cell.overrides,
        config=cell.snapshot,
        benchmark_dir=benchmark.path if benchmark else None,
        diagnosis_dir=diagnosis.path if diagnosis else None,
        manifests={name: dataclasses.asdict(a.manifest) for name, a in made.items()},
        reused={name: a.reused for name, a in made.items()},
        training_metrics=drafter.path / "metrics.jsonl" if drafter else None,
        capture_probe=states.manifest.facts.get("capture_probe") if states else None,
        sources=() if target is None else sources_of(cell.config, target.path, _published(cell), prompts),
        error=None if error is None else describe(error),
    )
    summary = report.write_report(run_dir, [record], command)
    if not in_sweep:
        point_latest(Path("outputs/latest"), run_dir)
    return summary.headline


def _published(cell: Cell) -> Path | None:
    """The directory of the drafter that the run took from elsewhere, if it got as far as that."""
    file = location.at_hand(cell.config.drafter)
    return file.parent if file is not None and file.is_file() else None


def describe(error: BaseException) -> str:
    """Our own messages as they are; others with their type, which is half of what they say."""
    return str(error) if isinstance(error, EagleError) else f"{type(error).__name__}: {error}"


def point_latest(link: Path, run_dir: Path) -> None:
    """Make `link` a symbolic link to the newest run, atomically."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(run_dir, link.parent), target_is_directory=True)
    fresh.replace(link)


class CompareCells(Callback):
    """At a multirun's end: one comparison of all cells, whatever launcher ran them."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Gather the cells' records from the sweep directory and report them together."""
        from eagle3x.cli import command_line
        from eagle3x.reporting import report

        sweep_dir = Path(config.hydra.sweep.dir)
        cells = report.load_cells(sweep_dir)
        if not cells:
            return
        report.write_report(sweep_dir, cells, command_line())
        point_latest(Path("multirun/latest"), sweep_dir)
        failed = [c.name for c in cells if c.error]
        if failed:
            print(f"eagle3x: {len(failed)} of {len(cells)} cells failed: {', '.join(failed)}", file=sys.stderr)
            sys.exit(1)
