"""A worker's conversation with `eagle3x.engines.offline`: an engine in a process of its own, told what to do by lines.

Imports the standard library only. A message is a line of JSON on stdin, its answers are lines of JSON on the descriptor
that EAGLE3X_REPLY_FD names (1 and 2 are the log):

    {"op": "load", "arguments": {...}}                         -> {"report": {...}}
    {"op": "generate", "requests": [...], "stop": [id, ...]}   -> {"completion": {...}} in order of completion
    {"op": "capture", "samples": [[token id, ...], ...]}       -> nothing: the states are in memory (`states_ring.py`)

each followed by {"done": true}, or {"error": ...} instead.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

gc.set_threshold(50_000)  # as in `engine_server.py`


class Offline(Protocol):
    """A loaded engine."""

    def report(self) -> dict[str, Any]:
        """What it says of itself."""
        ...

    def generate(self, requests: list[dict[str, Any]], stop: list[int]) -> Iterator[dict[str, Any]]:
        """Answer each, in order of completion. Nothing is streamed, so the first token's time is that of the whole."""
        ...

    def capture(self, samples: list[list[int]]) -> None:
        """Read each; rows of sample number n are marked so. The engine waits while its memory waits for the reader."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


def obey(load: Callable[[dict[str, Any]], Offline]) -> None:
    """Obey until stdin ends; `load` makes the engine from its arguments."""
    replies = os.fdopen(int(os.environ["EAGLE3X_REPLY_FD"]), "w", buffering=1)
    offline: Offline | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["op"] == "load":
                offline = load(message["arguments"])
                _say(replies, {"report": offline.report()})
            elif offline is None:
                raise RuntimeError("load comes first")
            elif message["op"] == "generate":
                for completion in offline.generate(message["requests"], message["stop"]):
                    _say(replies, {"completion": completion})
            elif message["op"] == "capture":
                offline.capture(message["samples"])
            else:
                raise RuntimeError(f"unknown op {message['op']}")
        except Exception as error:
            _say(replies, {"error": f"{type(error).__name__}: {error}"})
            raise  # with the trace in the log: an engine that failed once is not used again
        _say(replies, {"done": True})
    if offline is not None:
        offline.close()


def _say(replies: TextIO, reply: dict[str, Any]) -> None:
    """One line. What JSON has no type for, in what SGLang says of itself, is written as text."""
    replies.write(json.dumps(reply, default=str) + "\n")
    replies.flush()
