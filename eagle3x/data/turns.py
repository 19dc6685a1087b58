"""Ids of the turns of one conversation, and back: turns are not independent, so they are one cluster of an interval."""

from __future__ import annotations

import re
from collections.abc import Sequence

TURN = re.compile(r"(?s)(.+)#([2-9]|[1-9]\d+)")


def turn_id(id: str, turn: int) -> str:
    """The id of the sample that holds the answer number `turn` (from 1) of a conversation."""
    return id if turn == 1 else f"{id}#{turn}"


def conversations(ids: Sequence[str]) -> list[str]:
    """The conversation of each sample, named by its first turn.

    `x#2` is a turn of `x` only where `x` is there too: somebody's own ids may look like that. A later turn is never
    measured without the first one, which made its prompt.
    """
    first = set(ids)
    return [found[1] if (found := TURN.fullmatch(id)) and found[1] in first else id for id in ids]
