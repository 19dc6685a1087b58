"""95 % means 93 to 97: every kind of interval on the processes of benchmarks/coverage.py, whose truth is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.long
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
        ("survival at 3", 96, 800),
        ("alpha at 3", 96, 800),
        ("speed-up", 24, 800),
        ("tokens per second", 64, 800),
        ("paired difference of tau", 48, 800),
        ("gap of tau, n and 4 n prompts", 24, 800),
        ("tau over 3 seeds, spread 0.15", 24, 500),
        ("tau over 3 seeds, spread 0.4", 48, 500),
    ],
)
def test_95_percent_of_intervals_hold_the_truth(
    script: ModuleType, truths: dict[str, tuple[object, float]], figure: str, prompts: int, experiments: int
) -> None:
    experiment, truth = truths[figure]
    share, _ = script.covered(experiment, truth, prompts, experiments, resamples=1000)
    assert 0.93 <= share <= 0.97


def test_seeds_taken_for_all_that_there_are_would_not_cover(
    script: ModuleType, truths: dict[str, tuple[object, float]]
) -> None:
    experiment, truth = truths["3 seeds, spread 0.4, prompts alone"]
    share, _ = script.covered(experiment, truth, 48, 200, resamples=300)
    assert share < 0.85
