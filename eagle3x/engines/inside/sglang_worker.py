"""The offline engine's side of `eagle3x.engines.sglang_offline`: SGLang in a process of its own, told what to do by
lines.

Runs in SGLang's environment, as a script: imports SGLang and the standard library only. A message is a line of JSON on
stdin, its answers are lines of JSON on the descriptor that EAGLE3X_REPLY_FD names (1 and 2 are the log):

    {"op": "load", "arguments": {...}}                         -> {"info": {...}}
    {"op": "generate", "requests": [...], "stop": [id, ...]}   -> {"completion": {...}} in order of completion
    {"op": "capture", "samples": [...], "folder": ..., ...}    -> {"captured": id} in order of completion

each followed by {"done": true}, or {"error": ...} instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TextIO

BATCHES_AHEAD = 2
"""Requests given to the engine beforehand, in units of its largest batch."""
UNREAD_FILES = 4
"""Forwards whose states may wait for their reader: no sample is given to the engine while more do."""
PAUSE_SECONDS = 0.002


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

        yield from self._answers(iter(requests), answer, lambda waiting: len(waiting) < self.ahead)

    def capture(
        self, samples: list[dict[str, Any]], folder: Path, prefix: str, tokens_ahead: int
    ) -> Iterator[dict[str, Any]]:
        """Let the engine read each; its states are in the folder when its id is named here.

        tokens_ahead: tokens of the samples that are with the engine at one time, at least one sample.
        """

        async def read(sample: dict[str, Any]) -> dict[str, Any]:
            answered = await self.engine.async_generate(
                input_ids=sample["token_ids"],
                rid=prefix + sample["id"],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            )
            finished(answered, sample["id"])
            return {"captured": sample["id"]}

        def room(waiting: dict[asyncio.Task[Any], dict[str, Any]]) -> bool:
            if sum(len(sample["token_ids"]) for sample in waiting.values()) >= tokens_ahead:
                return False
            while not waiting and unread(folder):
                time.sleep(PAUSE_SECONDS)
            return not unread(folder)

        yield from self._answers(iter(samples), read, room)

    def _answers(
        self,
        items: Iterator[dict[str, Any]],
        ask: Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]],
        room: Callable[[dict[asyncio.Task[Any], dict[str, Any]]], bool],
    ) -> Iterator[dict[str, Any]]:
        """Give the engine its items while there is room, and yield each answer when it comes."""
        loop, more = self.engine.loop, True
        waiting: dict[asyncio.Task[Any], dict[str, Any]] = {}
        while more or waiting:
            while more and room(waiting):
                item = next(items, None)
                if item is None:
                    more = False
                else:
                    waiting[loop.create_task(ask(item))] = item
            if waiting:
                done, _ = loop.run_until_complete(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))
                for task in done:
                    del waiting[task]
                    yield task.result()


def unread(folder: Path) -> bool:
    """Whether as many files wait for their reader as may."""
    return sum(1 for _ in folder.glob("*.safetensors")) >= UNREAD_FILES


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
                folder, prefix, ahead = Path(message["folder"]), message["prefix"], message["tokens_ahead"]
                for reply in offline.capture(message["samples"], folder, prefix, ahead):
                    say(replies, reply)
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
