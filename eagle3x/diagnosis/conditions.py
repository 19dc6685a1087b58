"""Replays of one text under several conditions: a drafter, and the boundaries that it is fed.

States are captured in parts and dropped when every condition has been replayed on them, so that memory holds the states
of a few texts, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3x.diagnosis.captured_text import CapturedText, Text, captured
from eagle3x.diagnosis.replay import replay
from eagle3x.progress import track
from eagle3x.types import EagleError, SpecCounters

if TYPE_CHECKING:
    from eagle3x.drafters.eagle3 import Eagle3
    from eagle3x.engines.base import Engine

TOGETHER = 16
"""Texts whose states are in memory at once."""


@dataclass(frozen=True)
class Condition:
    """What is replayed."""

    name: str
    drafter: Eagle3
    boundaries: tuple[int, ...]


@dataclass(frozen=True)
class Replays:
    """Counters by condition, in the order of the texts, and the texts that were kept with their states."""

    counters: dict[str, tuple[SpecCounters, ...]]
    kept: tuple[CapturedText, ...]


def replay_all(
    engine: Engine,
    texts: Sequence[Text],
    conditions: Sequence[Condition],
    k: int,
    label: str,
    keep: int = 0,
    kept_boundaries: Iterable[int] = (),
) -> Replays:
    """Replay `texts` under each condition, and keep the first `keep` texts with the states at `kept_boundaries` too.

    Raises EagleError if the engine loses a text.
    """
    read = {b for condition in conditions for b in condition.boundaries}
    counters: dict[str, list[SpecCounters]] = {condition.name: [] for condition in conditions}
    kept: list[CapturedText] = []
    parts = [texts[start : start + TOGETHER] for start in range(0, len(texts), TOGETHER)]
    for part in track(parts, label, len(parts)):
        more = read | set(kept_boundaries) if len(kept) < keep else read
        found = {c.text.id: c for c in captured(engine, part, sorted(more))}
        if missing := [text.id for text in part if text.id not in found]:
            raise EagleError(f"the engine returned no states of {', '.join(missing[:5])}")
        states = [found[text.id] for text in part]
        for condition in conditions:
            fed = (s.fed(condition.boundaries) for s in states)
            counters[condition.name] += replay(condition.drafter, fed, k)
        kept += states[: keep - len(kept)] if len(kept) < keep else []
    return Replays({name: tuple(rows) for name, rows in counters.items()}, tuple(kept))
