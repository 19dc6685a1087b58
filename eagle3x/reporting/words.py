"""How figures are written: with their interval, their unit, and the same everywhere in a report."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3x.benchmark.bootstrap import Interval

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"


def figure(i: Interval | None, digits: int = 2, signed: bool = False) -> str:
    """`1.38 [1.31, 1.46]`."""
    if i is None:
        return NONE
    sign = "+" if signed else ""
    value, low, high = (minus(f"{v:{sign}.{digits}f}") for v in (i.value, i.low, i.high))
    return f"{value} [{low}, {high}]"


def times(i: Interval | None) -> str:
    """A ratio of times: `0.81x [0.78, 0.85]`."""
    return NONE if i is None else f"{i.value:.2f}{TIMES} [{i.low:.2f}, {i.high:.2f}]"


def percent(share: float | None, digits: int = 0) -> str:
    """`38 %`."""
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def seconds(value: float) -> str:
    """`0.4 s`, `42 s`, `3 min 20 s`, `2 h 05 min`."""
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 prompt`, `48 prompts`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def numbers(values: Sequence[int]) -> str:
    """`[2, 14, 26]`."""
    return f"[{', '.join(map(str, values))}]"


def first_line(message: str, limit: int = 320) -> str:
    """Of an error's message what it says first, without the place of a log or its end: part of a sentence."""
    line = (message.strip().splitlines() or ["no reason given"])[0].partition("; its log is ")[0]
    line = line.replace("; ", ", ")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def minus(text: str) -> str:
    """A true minus sign."""
    return text.replace("-", MINUS)
