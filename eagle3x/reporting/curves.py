"""Training curves, as training left them in metrics.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eagle3x.types import EagleError


@dataclass(frozen=True)
class Curves:
    """Points (optimizer step, value).

    `loss[k]`: cross-entropy of TTT step k, nats per kept row. `val_tau`: acceptance length by replay of the val split.
    """

    loss: tuple[tuple[tuple[int, float], ...], ...]
    val_tau: tuple[tuple[int, float], ...]

    @property
    def best(self) -> tuple[int, float] | None:
        """The validation with the highest tau, whose weights were kept."""
        return max(self.val_tau, key=lambda point: point[1], default=None)


def read_curves(path: Path) -> Curves:
    """Read metrics.jsonl.

    Raises:
        EagleError: the file is missing or is not what training writes.
    """
    loss: dict[int, list[tuple[int, float]]] = {}
    val: list[tuple[int, float]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            for k, value in enumerate(record.get("losses", ())):
                loss.setdefault(k, []).append((record["step"], value))
            if "val_tau" in record:
                val.append((record["step"], record["val_tau"]))
    except (OSError, KeyError, TypeError, ValueError) as e:
        raise EagleError(f"cannot read the training curves, {path}: {type(e).__name__}: {e}") from e
    return Curves(tuple(tuple(loss[k]) for k in sorted(loss)), tuple(val))
