"""`command=estimate` as its user sees it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3x import composition
from eagle3x.artifacts import ArtifactSpec, Store
from eagle3x.commands import estimate
from eagle3x.commands.config import EstimateArgs
from eagle3x.pipeline import STAGES
from eagle3x.reporting.words import TIMES
from eagle3x.types import ConfigError

HERE = {"target": {"weights": "t"}, "serve": {"engine": "vllm"}, "hardware": {"device": "cpu"}}
BY_HAND = ("plain_step_ms=10", "verify_step_ms=12", "draft_step_ms=1")


@pytest.fixture(scope="module")
def cell() -> composition.Cell:
    """By hand, with survival, in a store and for a target that are nowhere."""
    survival = "survival=[0.6,0.3,0.1]"
    (found,) = composition.cells(["command=estimate", survival, *BY_HAND, "batch=4", "artifacts=/nowhere",
                                  "target.path=/nowhere"], False)  # fmt: skip
    return found


def args(cell: composition.Cell, **changes: Any) -> EstimateArgs:
    assert isinstance(cell.command, EstimateArgs)
    return replace(cell.command, **changes)


def test_by_hand_nothing_is_looked_up(cell: composition.Cell) -> None:
    out = io.StringIO()
    estimate.run(args(cell), cell.config, Console(file=out, width=100))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert [line.split() for line in lines if line[:1].isdigit()] == [
        ["1", "4", "1.60", "1.30", "1.23" + TIMES, "yes"],
        ["2", "4", "1.90", "1.40", "1.36" + TIMES, "yes"],
        ["3", "4", "2.00", "1.50", "1.33" + TIMES, "yes"],
    ]
    assert "At batch 4: k = 2 comes out best." in lines


@pytest.mark.parametrize("survival", [(0.3, 0.6), (), (1.5,)])
def test_what_is_no_survival_is_bad_input(cell: composition.Cell, survival: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="survival: survival is shares of 0 to 1"):
        estimate.run(args(cell, survival=survival), cell.config, Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plain_step_ms": None}, "give plain_step_ms, verify_step_ms and draft_step_ms, or none"),
        ({"draft_step_ms": 0.0}, "more than 0 ms"),
        ({"longest": 0}, "batch and longest must be at least 1"),
    ],
)
def test_what_no_step_can_take(cell: composition.Cell, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        args(cell, **changes)


def timed(store: Store, k: int, decode: float, tau: float | None = 1.5, topk: int = 1, **identity: Any) -> str:
    """A benchmark that was timed at concurrency 1 and 8."""
    figures = {"decode": {"value": decode, "low": decode / 2, "high": decode * 2}, "tau": tau}
    record = {"topk": topk, "num_speculative_tokens": k, "speedup": {"1": figures, "8": figures}}

    def write(work: Path) -> dict[str, Any]:
        (work / "cell.json").write_text(json.dumps(record))
        return {}

    spec = ArtifactSpec(
        "benchmark", STAGES["benchmark"].version, {**HERE, "k": k, "decode": decode, "topk": topk, **identity}, {}, {}
    )
    return store.get_or_make(spec, write).key


def test_costs_come_from_every_chain_that_was_timed_here(tmp_path: Path) -> None:
    store = Store(tmp_path)
    short, long = timed(store, 1, 1.25), timed(store, 4, 0.75)
    timed(store, 2, 0.1, topk=4)
    timed(store, 3, 0.1, tau=None)
    timed(store, 5, 0.1, hardware={"device": "cuda"})
    one, eight = estimate.measured_costs(store, HERE)
    assert (one.batch, eight.batch) == (1, 8)
    # 1.5 / 1.25 and 1.5 / 0.75.
    ((k, cost), (other_k, other)) = one.points
    assert (k, cost.value, cost.low, cost.high) == pytest.approx((1, 1.2, 0.6, 2.4))
    assert (other_k, other.value, other.low, other.high) == pytest.approx((4, 2.0, 1.0, 4.0))
    assert one.source == f"measured by benchmark {short} (k = 1), benchmark {long} (k = 4)"
    assert estimate.measured_costs(Store(tmp_path / "empty"), HERE) == []
