"""The end of a run in the terminal: a table of the cells and the one sentence."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle3x.reporting.summary import Measurement, Summary
from eagle3x.reporting.tables import match
from eagle3x.reporting.words import NONE, figure, times


def show(summary: Summary, run_dir: Path, console: Console) -> None:
    """Print the final table and the sentence."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("cell", overflow="fold")
    for header in ("τ", "replay", "equal", "speed-up"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("boundaries", no_wrap=True)
    for cell in summary.cells:
        if cell.measured is None:
            said = Text("failed", "bold red") if cell.status == "failed" else Text("not served")
            table.add_row(Text(cell.label), *[NONE] * 4, said)
        else:
            table.add_row(Text(cell.label), *_figures(cell.measured), _match(cell.measured))
    console.print(table)
    for cell in summary.cells:
        if cell.error is not None:
            console.print(Text(f"{cell.name} failed: ", "bold red").append(Text(cell.error, "not bold default")))
    console.print(Text(summary.headline, "bold"))
    console.print(Text(f"report: {run_dir / 'report.html'}", "dim"))


def _figures(m: Measurement) -> tuple[Text, ...]:
    replay = m.replay
    return (
        Text(figure(m.tau)),
        Text(f"{replay.tau.value:.2f}" if replay else NONE),
        Text(f"{replay.identical_counters}/{replay.requests}" if replay else NONE),
        Text(times(next(iter(m.speedup.values())).decode) if m.speedup else "not measured"),
    )


def _match(m: Measurement) -> Text:
    said = match(m)
    return Text(said.text, {"bad": "bold red", "good": "green"}.get(said.tone, ""))
