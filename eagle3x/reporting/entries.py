"""The cells and tables of a report, before they are HTML, Markdown or text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "good", "bad", "quiet", "code"]


@dataclass(frozen=True)
class Entry:
    """One table cell. `tone` is for the eye only: the text says the same."""

    text: str
    tone: Tone = ""
    note: str = ""
    """What belongs to the value and is less than it: its interval."""

    @property
    def flat(self) -> str:
        """Text and note on one line."""
        return f"{self.text}{' ' if self.note.startswith('[') else ', '}{self.note}" if self.note else self.text


@dataclass(frozen=True)
class Table:
    """`rows[i][0]` names row i."""

    id: str
    title: str
    note: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]


def with_interval(text: str) -> Entry:
    """`1.38 [1.31, 1.46]`, its interval as the note."""
    value, _, interval = text.partition(" ")
    return Entry(value, note=interval)


def p_value(value: float) -> str:
    """`0.031`, `< 0.001`."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
