"""Training curves, as training left them in metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean

from eagle3x.types import EagleError

Line = tuple[tuple[int, float], ...]
"""Points (optimizer step, value)."""


@dataclass(frozen=True)
class Curves:
    """How a drafter was trained.

    `loss[k]`, `accuracy[k]`: of TTT step k over the kept rows, the loss that was trained on and the share of rows
    whose argmax is right; an optimizer step without such rows has no point. `val_tau`, `val_survival[i]`: by replay of
    the val split.
    `diverged_at`: the first step whose loss is not finite.
    """

    loss: tuple[Line, ...]
    accuracy: tuple[Line, ...]
    learning_rate: Line
    val_tau: Line
    val_survival: tuple[Line, ...]
    diverged_at: int | None

    @property
    def best(self) -> tuple[int, float] | None:
        """The first validation with the highest tau, whose weights were kept."""
        return max(self.val_tau, key=lambda point: point[1], default=None)


def read_curves(path: Path) -> Curves:
    """Read metrics.jsonl.

    Raises:
        EagleError: the file is missing or is not what training writes.
    """
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [r for r in records if "loss" in r]
        validations = [r for r in records if "val" in r]
        diverged = [r["step"] for r in steps if not all(map(isfinite, _kept(r["loss"], r["rows"])))]
        return Curves(
            loss=_lines([(r["step"], r["loss"], r["rows"]) for r in steps]),
            accuracy=_lines([(r["step"], r["accuracy"], r["rows"]) for r in steps]),
            learning_rate=tuple((r["step"], r["learning_rate"]) for r in steps),
            val_tau=tuple((r["step"], r["val"]["tau"]) for r in validations),
            val_survival=_lines([(r["step"], s := r["val"]["survival"], [1] * len(s)) for r in validations]),
            diverged_at=min(diverged, default=None),
        )
    except (OSError, KeyError, TypeError, ValueError) as e:
        raise EagleError(f"cannot read the training curves, {path}: {type(e).__name__}: {e}") from e


def thinned(line: Line, most: int) -> Line:
    """At most `most` points: means over equal runs of points."""
    size = -(-len(line) // most)
    runs = [line[i : i + size] for i in range(0, len(line), size)]
    return tuple((round(fmean(s for s, _ in run)), fmean(v for _, v in run)) for run in runs)


def _kept(values: Sequence[float], rows: Sequence[int]) -> list[float]:
    return [v for v, n in zip(values, rows, strict=True) if n > 0]


def _lines(records: Sequence[tuple[int, Sequence[float], Sequence[int]]]) -> tuple[Line, ...]:
    width = max((len(values) for _, values, _ in records), default=0)
    return tuple(
        tuple((step, v[k]) for step, v, rows in records if k < len(v) and rows[k] > 0 and isfinite(v[k]))
        for k in range(width)
    )
