"""What of an engine's log says why it ended: the exceptions' own lines.

Around them stand hundreds of lines of tracebacks, and after them those of the shutdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

TRACEBACK = "Traceback (most recent call last):"
PREFIX = re.compile(
    r"(?:\[rank\d+\]: ?)?(?P<process>\([\w ]+ pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+:\d+\] ?)?"
)
"""What vLLM and torchrun write before each line of a traceback."""
EXCEPTION = re.compile(r"(?=[\w.]*[a-z])[A-Za-z_][\w.]*(?:(?:Error|Exception|Exit|Interrupt)$|:(?: |$))")
ARGUMENTS = re.compile(r"[\w.-]+: error: ")
"""How argparse ends a program."""
MOST, LONGEST = 4, 600
"""Exceptions that are told, and characters of each."""


def raised(lines: Iterable[str]) -> list[str]:
    """The line of each exception that a traceback ends with, each once, in the order of the log.

    The first is the root: what was raised while it was handled, and what other processes raised because of it, comes
    after it. Lines of several processes may alternate.
    """
    found: dict[str, None] = {}
    open_in: set[str] = set()
    for line in lines:
        prefix = PREFIX.match(line)
        assert prefix is not None, "every part of it is optional"
        process, text = prefix["process"] or "", line[prefix.end() :].rstrip()
        if text.endswith(TRACEBACK):
            open_in.add(process)
        elif ARGUMENTS.match(text):
            found[text] = None
        elif process in open_in and EXCEPTION.match(text):
            found[text] = None
            open_in.remove(process)
    return [text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…" for text in found][:MOST]
