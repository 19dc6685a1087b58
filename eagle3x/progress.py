"""Progress on stderr: a bar for whatever takes more than a few seconds, plain lines where there is no terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")
console = Console(stderr=True)
logger = logging.getLogger("eagle3x")
PLAIN_SECONDS = 15.0
"""Without a terminal, one line at most this often."""


def log(message: str) -> None:
    """Tell the user, and the run's log file."""
    logger.info(message)


def track(iterable: Iterable[T], description: str | Callable[[], str], total: int) -> Iterator[T]:
    """Yield from `iterable` with a progress bar of `total` steps. A description that is called may show a rate."""
    describe = description if callable(description) else lambda: description
    if not sys.stderr.isatty():
        yield from _plain(iterable, describe, total)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(describe(), total=total)
        for item in iterable:
            yield item
            bar.update(task, advance=1, description=describe())


def _plain(iterable: Iterable[T], describe: Callable[[], str], total: int) -> Iterator[T]:
    last = time.monotonic()
    for done, item in enumerate(iterable, 1):
        yield item
        if time.monotonic() - last > PLAIN_SECONDS:
            last = time.monotonic()
            log(f"{describe()}: {done} of {total}")
