"""Everything that a run leaves for people: report.html, report.md, summary.json, the terminal's table and a W&B run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from eagle3x.reporting.cell import Cell, load_cells, save_cell, without_credentials, write_atomically
from eagle3x.reporting.cell_summary import summarize_cell
from eagle3x.reporting.comparisons import compare_cells, first_pairs, found_confounders
from eagle3x.reporting.confounders import short_names
from eagle3x.reporting.controls import find_controls
from eagle3x.reporting.headline import headline
from eagle3x.reporting.html import html_report
from eagle3x.reporting.markdown import markdown_report
from eagle3x.reporting.masking import masked_text
from eagle3x.reporting.pooling import pool_cells
from eagle3x.reporting.summary import Summary
from eagle3x.reporting.terminal import show
from eagle3x.reporting.wandb import track_run

__all__ = ["Cell", "load_cells", "summarize", "write_report"]


def write_report(run_dir: Path, cells: Sequence[Cell], command: str) -> Summary:
    """Report one run, or the cells of a multirun together, into `run_dir`.

    A single cell also leaves its record there, for the comparison at the sweep's end. The report is on the disk before
    W&B hears of it, and stays if W&B fails.

    Raises:
        EagleError: a cell's artifacts cannot be read.
    """
    if not cells:
        raise ValueError("there is no cell to report")
    if len(cells) == 1:
        save_cell(cells[0], run_dir)
    summary = summarize(cells, command)
    write_atomically(run_dir / "summary.json", summary.dumps())
    write_atomically(run_dir / "report.md", markdown_report(summary))
    write_atomically(run_dir / "report.html", html_report(summary))
    show(summary, run_dir, Console())
    track_run(summary, cells[0].config["tracking"], run_dir)
    return summary


def summarize(cells: Sequence[Cell], command: str) -> Summary:
    """The records behind every output, from the cells' artifacts."""
    cells = [without_credentials(c) for c in cells]
    comparisons = compare_cells(cells)
    recipes, recipe_comparisons = pool_cells(cells)
    overrides = [c.overrides for c in cells]
    baselines = first_pairs(overrides)
    labels = short_names(overrides, [c.name for c in cells])
    summaries = [
        summarize_cell(c, labels[i], found_confounders(cells, baselines[i]) if i in baselines else ())
        for i, c in enumerate(cells)
    ]
    return Summary(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=masked_text(command),
        headline=headline(summaries, comparisons, recipes),
        cells=tuple(summaries),
        comparisons=tuple(comparisons),
        recipes=tuple(recipes),
        recipe_comparisons=tuple(recipe_comparisons),
        controls=tuple(find_controls(summaries, comparisons)),
    )
