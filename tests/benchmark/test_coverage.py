"""95 % means 93 to 97: every kind of interval on the processes of benchmarks/coverage.py, whose truth is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/coverage.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_of_intervals", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def truths(script: ModuleType) -> dict[str, tuple[object, float]]:
    return script.truths()


@pytest.mark.parametrize(
    ("figure", "prompts", "experiments"),
    [
        ("survival at 3", 48, 1500),
        ("alpha at 3", 48, 1500),
        ("speed-up", 12, 1500),
        ("tokens per second", 12, 1500),
        ("paired difference of tau", 24, 1500),
        ("gap of tau, n and 4 n prompts", 24, 1500),
        ("tau over 3 seeds, spread 0.15", 24, 800),
        ("tau over 3 seeds, spread 0.4", 24, 800),
    ],
)
def test_95_percent_of_intervals_hold_the_truth(
    script: ModuleType, truths: dict[str, tuple[object, float]], figure: str, prompts: int, experiments: int
) -> None:
    experiment, truth = truths[figure]
    share, _ = script.covered(experiment, truth, prompts, experiments, resamples=300)
    assert 0.93 <= share <= 0.97


def test_seeds_taken_for_all_that_there_are_would_not_cover(
    script: ModuleType, truths: dict[str, tuple[object, float]]
) -> None:
    experiment, truth = truths["3 seeds, spread 0.4, prompts alone"]
    share, _ = script.covered(experiment, truth, 48, 300, resamples=300)
    assert share < 0.85
