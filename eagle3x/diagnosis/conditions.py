"""Replays of one text under several conditions: a drafter, and the boundaries that it is fed.

States are captured in parts and dropped when every condition has been replayed on them, so that memory holds the states
of a few texts, however many there are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def boundaries_of(conditions: Sequence[Condition]) -> list[int]:
    """What must be captured for all of them, ascending."""
    return sorted({b for condition in conditions for b in condition.boundaries})


def replay_all(
    engine: Engine,
    texts: Sequence[Text],
    conditions: Sequence[Condition],
    k: int,
    label: str,
    kept: Sequence[CapturedText] = (),
    also: Collection[int] = (),
) -> dict[str, tuple[SpecCounters, ...]]:
    """Counters of each text, in their order, under each condition.

    kept: of the same engine; what has all boundaries is not captured again. also: boundaries that are captured too,
    because the engine has captured or will capture them: one with a process of its own starts anew for other ones.

    Raises EagleError if the engine loses a text.
    """
    counters: dict[str, list[SpecCounters]] = {condition.name: [] for condition in conditions}
    boundaries = sorted({*also, *boundaries_of(conditions)})
    at_hand = {c.text: c for c in kept if set(boundaries) <= set(c.boundaries)}
    parts = [texts[start : start + TOGETHER] for start in range(0, len(texts), TOGETHER)] if conditions else []
    for part in track(parts, label, len(parts)):
        found = {text.id: at_hand[text] for text in part if text in at_hand}
        if asked := [text for text in part if text not in at_hand]:
            found |= {c.text.id: c for c in captured(engine, asked, boundaries)}
        if missing := [text.id for text in part if text.id not in found]:
            raise EagleError(f"the engine returned no states of {', '.join(missing[:5])}")
        for condition in conditions:
            fed = (found[text.id].fed(condition.boundaries) for text in part)
            counters[condition.name] += replay(condition.drafter, fed, k)
    return {name: tuple(rows) for name, rows in counters.items()}
