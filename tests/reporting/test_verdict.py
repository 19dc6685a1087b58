"""The one sentence of a diagnosis, of diagnoses made by hand."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnoses import DIED, diagnosis
from rich.console import Console

from eagle3x.reporting import report
from eagle3x.reporting.headline import headline
from eagle3x.reporting.html import html_report
from eagle3x.reporting.markdown import markdown_report
from eagle3x.reporting.summary import CellSummary, Summary
from eagle3x.reporting.terminal import show
from eagle3x.reporting.verdict import GET_SERVED, sweep_verdict, verdict
from eagle3x.reporting.words import first_line

UNSERVED = (1.62, 1.62, None, None, None)


def test_what_could_not_be_served_is_told_as_that_first_with_what_was_shown_and_what_to_do() -> None:
    assert verdict(diagnosis(UNSERVED), measured=False) == (
        "Diagnosis: the drafter could not be served: the server at http://127.0.0.1:1 was ended by SIGKILL (exit code"
        " 137): RuntimeError: no kernel, sorry; shown without serving: nothing is lost from the drafter as trained"
        f" (tau 1.62) to as exported (1.62); to do: {GET_SERVED}"
    )


def test_a_fault_below_the_engine_is_not_hidden_by_that() -> None:
    found = diagnosis((1.62, 1.2, None, None, None), broken=("exported",), causes=(("d2t_shifted", "exported", -0.42),))
    said = verdict(found, measured=False)
    assert said.startswith("Diagnosis: the drafter could not be served: ")
    assert (
        "; shown without serving: its vocabulary map is shifted (tau \u22120.42) (to change: mend d2t_shifted)" in said
    )


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (diagnosis(), "Diagnosis: nothing is lost from the drafter as trained (tau 1.60) to as served (1.60)"),
        (diagnosis((1.6, 1.6, 1.5, 1.5, 1.5), broken=("responses",), causes=(("quantized_text", "responses", -0.1),)),
         "Diagnosis: the quantized target writes other text (tau \u22120.10). To change first: mend quantized_text"),
        (diagnosis(UNSERVED, "trees are not replayed: use speculation=chain"),
         "Diagnosis: nothing is lost from the drafter as trained (tau 1.62) to as exported (1.62);"
         " no further: trees are not replayed: use speculation=chain"),
    ],
    ids=["sound", "broken", "tree"],
)  # fmt: skip
def test_what_was_served(found: dict[str, Any], wanted: str) -> None:
    assert verdict(found, measured=True) == wanted


def test_a_sweep_says_in_how_many_cells_and_where_most() -> None:
    lossy = diagnosis((1.6, 1.6, 1.5, 1.44, 1.44), broken=("responses", "states"))
    worse = diagnosis((1.6, 1.6, 1.6, 1.3, 1.3), broken=("states",))
    assert sweep_verdict([("a", diagnosis()), ("b", lossy), ("c", worse), ("d", diagnosis(UNSERVED))]) == (
        "Diagnosis: tau is lost in 2 of 4 cells (1 could not be climbed to the engine), most in \u201cc\u201d by the"
        " states that are fed, \u22120.30 [\u22120.31, \u22120.29]"
    )
    hidden = diagnosis(unsure=("responses", "states"))
    assert sweep_verdict([("a", diagnosis()), ("b", hidden)]) == (
        "Diagnosis: no loss shown in 2 cells (in 1 a loss that counts might be hidden)"
    )
    weak = diagnosis(causes=(("weak_drafter", "trained", -0.1),))
    assert sweep_verdict([("a", diagnosis()), ("b", weak)]) == (
        "Diagnosis: no rung is broken in 2 cells, but in \u201cb\u201d the drafter is weak"
    )
    assert sweep_verdict([("a", diagnosis()), ("b", diagnosis())]) == "Diagnosis: no loss shown in 2 cells"


def test_of_a_message_its_first_line() -> None:
    assert first_line(DIED).endswith("(exit code 137): RuntimeError: no kernel, sorry")
    assert first_line("x exited with code 2; its log is /a.log and ends:\nlast") == "x exited with code 2"
    assert first_line("x" * 900) == "x" * 319 + "…"
    assert first_line(" \n") == "no reason given"


def unserved(failed_cell: Any, error: str | None = DIED) -> CellSummary:
    """A cell that was diagnosed as far as that goes, and whose engine died."""
    (cell,) = report.summarize([failed_cell], "x").cells
    return replace(cell, label="int4", diagnosis=diagnosis(UNSERVED), error=error, status="failed" if error else "ok")


def test_every_output_says_so(failed_cell: Any, tmp_path: Path) -> None:
    summary: Summary = report.summarize([failed_cell], "x")
    cell = unserved(failed_cell)
    summary = replace(summary, cells=(cell,), headline=headline([cell], ()))
    page, text = html_report(summary), markdown_report(summary)
    assert "<h1>Diagnosis: the drafter could not be served: the server at" in page
    assert "RuntimeError: no kernel, sorry</h1>" in page
    assert page.count("line 436") == text.count("line 436") == 1  # the log's end is told once, as the failure
    assert "**could not be served**" in text
    out = io.StringIO()
    show(summary, tmp_path, Console(file=out, width=2000))
    assert f"\n{summary.headline}" in out.getvalue()


def test_a_sweep_names_the_first_that_failed_and_why(failed_cell: Any, make_cell: Any) -> None:
    (sound,) = report.summarize([make_cell()], "x").cells
    sound = replace(sound, label="plain", diagnosis=diagnosis())
    said = headline([sound, unserved(failed_cell)], ())
    assert said.startswith("Diagnosis: no loss shown in 2 cells (1 could not be climbed to the engine); highest tau ")
    assert said.endswith(
        "; 1 of 2 cells failed; the first: cell \u201cint4\u201d failed: the server at http://127.0.0.1:1 was ended by"
        " SIGKILL (exit code 137): RuntimeError: no kernel, sorry"
    )
    refused = unserved(failed_cell, None)  # known before it was tried: no failure
    assert headline([refused, refused], ()) == (
        "Diagnosis: no loss shown in 2 cells (2 could not be climbed to the engine)"
    )
