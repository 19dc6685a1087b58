from __future__ import annotations

from dataclasses import replace
from typing import Any

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.reporting import report
from eagle3x.reporting.headline import headline
from eagle3x.reporting.summary import CellSummary, Measurement, SpeedUp


def known(cell: Any, **changes: Any) -> CellSummary:
    """A cell with figures fixed by hand."""
    (found,) = report.summarize([cell], "x").cells
    assert isinstance(found.measured, Measurement)
    assert found.measured.replay is not None
    ratio = changes.pop("speedup", Interval(0.8, 0.7, 0.9))
    measured = replace(
        found.measured,
        tau=Interval(1.384, 1.31, 1.46),
        speedup={} if ratio is None else {"1": SpeedUp(ratio, ratio, 1.36, 6, found.measured.speedup["1"].rates)},
        replay=replace(found.measured.replay, identical_counters=47),
        **changes,
    )
    return replace(found, measured=measured)


def test_one_cell_says_what_it_is_worth_and_what_it_costs(make_cell: Any) -> None:
    assert headline([known(make_cell())], ()) == (
        "tau 1.38 [1.31, 1.46] on 48 prompts: 0.38 extra tokens per verify step;"
        " replay agrees with the engine in 47 of 48 requests;"
        " slow-down 0.80\u00d7 [0.70, 0.90]: a verify step with its drafts costs 1.70 plain steps here"
    )


def test_speed_is_called_a_speedup_only_if_its_interval_says_so(make_cell: Any) -> None:
    cell = make_cell()
    assert "; speed-up 1.70\u00d7 [1.60, 1.80]: a verify" in headline(
        [known(cell, speedup=Interval(1.7, 1.6, 1.8))], ()
    )
    assert "; no speed-up shown, 1.02\u00d7 [0.95, 1.10]" in headline(
        [known(cell, speedup=Interval(1.02, 0.95, 1.1))], ()
    )
    assert headline([known(cell, speedup=None)], ()).endswith("; speed not measured")


def test_a_mismatched_cell_says_so(make_cell: Any) -> None:
    assert "; MISMATCHED: the engine is fed other boundaries" in headline([known(make_cell(), mismatched=True)], ())
    assert "MISMATCHED" not in headline([known(make_cell("other"), mismatched=None)], ())


def test_a_matrix_names_its_best_and_what_the_wrong_cells_lose(matrix: list[Any]) -> None:
    summary = report.summarize(matrix, "x")
    said = summary.headline
    assert said.startswith("Highest tau ")
    assert "in cell \u201cvllm, trained\u201d" in said
    assert "2 of 4 cells are mismatched and tau changes there by \u22120.1" in said
    losses = sorted(c.difference.value for c in summary.comparisons if "serve.capture" in c.swept)
    assert f"{losses[0]:+.2f} to {losses[1]:+.2f}".replace("-", "\u2212") in said


def test_failures_are_told(make_cell: Any, failed_cell: Any) -> None:
    assert report.summarize([failed_cell], "x").headline == (
        "cell \u201cthis run\u201d failed: the server ended with code -9 <before it was ready>"
    )
    assert report.summarize([make_cell(overrides=("backend=vllm",)), failed_cell], "x").headline.endswith(
        "; 1 of 2 cells failed; the first: cell \u201csglang\u201d failed: the server ended with code -9"
        " <before it was ready>"
    )
    assert report.summarize([failed_cell, failed_cell], "x").headline.startswith("All 2 cells failed; the first: cell")
