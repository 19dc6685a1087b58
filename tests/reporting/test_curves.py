from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3x.reporting.curves import read_curves, thinned
from eagle3x.types import EagleError

STEP = {"tokens": 10, "learning_rate": 0.1, "accuracy": [0.5, 0.25], "seconds": 1.0}


def write(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_lines_by_ttt_step_and_validation(tmp_path: Path) -> None:
    curves = read_curves(
        write(
            tmp_path / "metrics.jsonl",
            [
                {"step": 0, "val": {"tau": 1.1, "survival": [0.1, 0.0]}},
                {"step": 1, "loss": [3.0, 4.0], "rows": [5, 4], **STEP},
                {"step": 2, "loss": [2.0, 0.0], "rows": [5, 0], **STEP},
                {"step": 2, "val": {"tau": 1.3, "survival": [0.2, 0.1]}},
                {"step": 4, "val": {"tau": 1.3, "survival": [0.3, 0.0]}},
            ],
        )
    )
    assert curves.loss == (((1, 3.0), (2, 2.0)), ((1, 4.0),))
    assert curves.accuracy == (((1, 0.5), (2, 0.5)), ((1, 0.25),))
    assert curves.learning_rate == ((1, 0.1), (2, 0.1))
    assert curves.val_tau == ((0, 1.1), (2, 1.3), (4, 1.3))
    assert curves.val_survival == (((0, 0.1), (2, 0.2), (4, 0.3)), ((0, 0.0), (2, 0.1), (4, 0.0)))
    assert curves.best == (2, 1.3)
    assert curves.diverged_at is None


def test_a_loss_that_is_not_finite_is_told_and_not_drawn(tmp_path: Path) -> None:
    nan = float("nan")
    records: list[dict[str, object]] = [
        {"step": 1, "loss": [3.0, nan], "rows": [5, 0], **STEP},  # no row, no loss: nothing is wrong
        {"step": 2, "loss": [nan, 1.0], "rows": [5, 4], **STEP},
        {"step": 3, "loss": [float("inf"), 1.0], "rows": [5, 4], **STEP},
    ]
    curves = read_curves(write(tmp_path / "metrics.jsonl", records))
    assert curves.diverged_at == 2
    assert curves.loss == (((1, 3.0),), ((2, 1.0), (3, 1.0)))


def test_thinning_takes_means() -> None:
    line = tuple((step, float(step)) for step in range(1, 9))
    assert thinned(line, 100) == line
    assert thinned(line, 4) == ((2, 1.5), (4, 3.5), (6, 5.5), (8, 7.5))
    assert len(thinned(line, 3)) == 3


@pytest.mark.parametrize("content", ["not json\n", '{"step": 1, "loss": [1.0]}\n', '{"step": 1, "val": {}}\n'])
def test_another_format_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(EagleError, match="training curves"):
        read_curves(tmp_path / "metrics.jsonl")
    with pytest.raises(EagleError, match="training curves"):
        read_curves(tmp_path / "absent.jsonl")
