"""The offline engine's side of `eagle3x.engines.sglang_offline`: SGLang in a process of its own, told what to do by
lines.

Runs in SGLang's environment, as a script: imports SGLang, what lies beside it, and the standard library only. A message
is a line of JSON on stdin, its answers are lines of JSON on the descriptor that EAGLE3X_REPLY_FD names (1 and 2 are the
log):

    {"op": "load", "arguments": {...}}                         -> {"info": {...}}
    {"op": "generate", "requests": [...], "stop": [id, ...]}   -> {"completion": {...}} in order of completion
    {"op": "capture", "samples": [[token id, ...], ...]}       -> nothing: the states are in memory (`states_ring.py`)

each followed by {"done": true}, or {"error": ...} instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TextIO

from sglang_capture.order import PREFIX

BATCHES_AHEAD = 2
"""Requests given to the engine beforehand, in units of its largest batch."""


class Offline:
    """The loaded engine. It runs in processes of its own; here is its front, an asyncio program."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(**arguments)
        self.ahead = BATCHES_AHEAD * arguments["max_running_requests"]

    def generate(self, requests: list[dict[str, Any]], stop: list[int]) -> Iterator[dict[str, Any]]:
        """Answer each. Nothing is streamed, so the first token's time is that of the whole answer."""

        async def answer(request: dict[str, Any]) -> dict[str, Any]:
            start = time.perf_counter()
            answered = await self.engine.async_generate(
                input_ids=request["prompt_ids"],
                rid=request["id"],
                sampling_params={
                    "max_new_tokens": request["max_tokens"],
                    "temperature": request["temperature"],
                    "top_p": request["top_p"],
                    "sampling_seed": request["seed"],
                    "ignore_eos": request["ignore_eos"],
                    "stop_token_ids": [] if request["ignore_eos"] else stop,
                },
            )
            end = time.perf_counter()
            finish = finished(answered, request["id"])
            said = {"id": request["id"], "token_ids": answered["output_ids"], "finish": finish}
            return {"completion": {**said, "timing": [start, end, end]}}

        yield from self._answers(iter(requests), answer)

    def capture(self, samples: list[list[int]]) -> None:
        """Let the engine read each. It waits while all of the memory waits for its reader."""

        async def read(numbered: tuple[int, list[int]]) -> None:
            number, token_ids = numbered
            answered = await self.engine.async_generate(
                input_ids=token_ids,
                rid=f"{PREFIX}{number}",
                sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            )
            finished(answered, f"sample {number}")

        for _ in self._answers(enumerate(samples), read):
            pass

    def _answers(self, items: Iterator[Any], ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Iterator[Any]:
        """Give the engine its items little by little, and yield each answer when it comes."""
        loop, more = self.engine.loop, True
        waiting: set[asyncio.Task[Any]] = set()
        while more or waiting:
            while more and len(waiting) < self.ahead:
                item = next(items, None)
                if item is None:
                    more = False
                else:
                    waiting.add(loop.create_task(ask(item)))
            if waiting:
                done, waiting = loop.run_until_complete(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))
                yield from (task.result() for task in done)


def finished(answered: dict[str, Any], request: str) -> str:
    """How an answer ended: "stop" or "length".

    Raises:
        RuntimeError: in another way, for example because SGLang gave it up.
    """
    reason = answered["meta_info"]["finish_reason"]
    if reason is None or reason["type"] not in ("stop", "length"):
        raise RuntimeError(f"SGLang did not answer {request}: {reason}")
    return reason["type"]


def main() -> None:
    """Obey until stdin ends."""
    replies = os.fdopen(int(os.environ["EAGLE3X_REPLY_FD"]), "w", buffering=1)
    offline: Offline | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["op"] == "load":
                offline = Offline(message["arguments"])
                say(replies, {"info": offline.engine.get_server_info()})
            elif offline is None:
                raise RuntimeError("load comes first")
            elif message["op"] == "generate":
                for reply in offline.generate(message["requests"], message["stop"]):
                    say(replies, reply)
            elif message["op"] == "capture":
                offline.capture(message["samples"])
            else:
                raise RuntimeError(f"unknown op {message['op']}")
        except Exception as error:
            say(replies, {"error": f"{type(error).__name__}: {error}"})
            raise  # with the trace in the log: an engine that failed once is not used again
        say(replies, {"done": True})
    if offline is not None:
        offline.engine.shutdown()


def say(replies: TextIO, reply: dict[str, Any]) -> None:
    """One line. What JSON has no type for, in what SGLang says of itself, is written as text."""
    replies.write(json.dumps(reply, default=str) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
