"""Cells that differ in their seed alone, in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3x.benchmark.bootstrap import Bootstrap
from eagle3x.benchmark.seeds import pool_tau
from eagle3x.reporting import report
from eagle3x.reporting.acceptance import read_requests
from eagle3x.reporting.cell import Cell


@pytest.fixture
def seeds(make_cell: Any) -> list[Cell]:
    """Two recipes with three seeds each; the second is worse by more than its seeds differ."""
    cells = []
    for capture, chances in (("as_is", (0.30, 0.32, 0.31)), ("plus_one", (0.22, 0.21, 0.23))):
        for seed, alpha in enumerate(chances, 1):
            overrides = (f"seed={seed}", f"capture={capture}")
            cell = make_cell(" ".join(overrides), alpha=alpha, overrides=overrides, drafter=f"d{seed}")
            cell.config["seed"] = seed
            cell.config["capture"]["convention"] = capture
            cells.append(cell)
    return cells


def test_seeds_are_pooled_and_recipes_compared(seeds: list[Cell], tmp_path: Path) -> None:
    report.write_report(tmp_path, seeds, "python -m eagle3x -m")
    summary = json.loads((tmp_path / "summary.json").read_text())
    first, second = summary["recipes"]
    assert (first["label"], first["seeds"], first["prompts"]) == ("as_is", [1, 2, 3], 48)
    assert first["cells"] == [c.name for c in seeds[:3]]
    counters = [[r.served for r in read_requests(c.benchmark_dir).values()] for c in seeds[:3] if c.benchmark_dir]
    pooled = pool_tau(counters, [str(i) for i in range(48)], Bootstrap(400, 0.95, 1))
    assert first["tau"]["value"] == pytest.approx(pooled.figure.value)
    assert first["spread"] == pytest.approx(pooled.spread)
    (difference,) = summary["recipe_comparisons"]
    assert (difference["recipe"], difference["baseline"], difference["swept"]) == ("plus_one", "as_is", ["capture"])
    assert difference["difference"]["value"] == pytest.approx(second["tau"]["value"] - first["tau"]["value"])
    assert difference["difference"]["high"] < 0
    assert difference["p_holm"] == difference["p_value"] < 0.05

    assert {tuple(p["swept"]) for p in summary["comparisons"]} == {("capture",)}, "seeds are no pairs"
    headline = summary["headline"]
    assert headline.startswith(f"Highest tau {first['tau']['value']:.2f} [")
    assert "over 3 seeds and 48 prompts (other seeds ±" in headline
    assert "of recipe “as_is”" in headline
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "Recipes over seeds" in text
        assert "3 seeds say little of others: t of 2 degrees of freedom, 4.3 at 95 %" in text
        assert "Differences between recipes" in text
    documented = (Path(__file__).parents[2] / "docs" / "summary.md").read_text()
    assert [f for f in (*first, *difference) if f"`{f}`" not in documented] == []


def test_without_several_seeds_nothing_is_pooled(matrix: list[Cell]) -> None:
    summary = report.summarize(matrix, "x")
    assert (summary.recipes, summary.recipe_comparisons) == ((), ())


def test_a_failed_seed_leaves_the_others(seeds: list[Cell], failed_cell: Cell) -> None:
    summary = report.summarize([*seeds[:2], failed_cell], "x")
    assert [r.seeds for r in summary.recipes] == [(1, 2)]
    assert summary.recipe_comparisons == ()
    assert summary.headline.startswith(f"tau {summary.recipes[0].tau.value:.2f} [")
