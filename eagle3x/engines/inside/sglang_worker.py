"""SGLang without a server, in a process of its own. Runs in SGLang's environment, as a script: `obey.py` says how."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from obey import obey
from sglang_capture.order import PREFIX

BATCHES_AHEAD = 2
"""Requests given to the engine beforehand, in units of its largest batch."""


class Offline:
    """The loaded engine. It runs in processes of its own; here is its front, an asyncio program."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(**arguments)
        self._ahead = BATCHES_AHEAD * arguments["max_running_requests"]

    def report(self) -> dict[str, Any]:
        """As /server_info of a server."""
        return self._engine.get_server_info()

    def generate(self, requests: list[dict[str, Any]], stop: list[int]) -> Iterator[dict[str, Any]]:
        """Answer each."""

        async def answer(request: dict[str, Any]) -> dict[str, Any]:
            start = time.perf_counter()
            answered = await self._engine.async_generate(
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
            reply = {"id": request["id"], "token_ids": answered["output_ids"], "finish": finish}
            return {**reply, "timing": [start, end, end]}

        yield from self._answers(iter(requests), answer)

    def capture(self, samples: list[list[int]]) -> None:
        """Let the engine read each."""

        async def read(numbered: tuple[int, list[int]]) -> None:
            number, token_ids = numbered
            answered = await self._engine.async_generate(
                input_ids=token_ids,
                rid=f"{PREFIX}{number}",
                sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            )
            finished(answered, f"sample {number}")

        for _ in self._answers(enumerate(samples), read):
            pass

    def close(self) -> None:
        """End SGLang's processes."""
        self._engine.shutdown()

    def _answers(self, items: Iterator[Any], ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Iterator[Any]:
        """Give the engine its items little by little, and yield each answer when it comes."""
        loop, more = self._engine.loop, True
        waiting: set[asyncio.Task[Any]] = set()
        while more or waiting:
            while more and len(waiting) < self._ahead:
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


if __name__ == "__main__":
    obey(Offline)
