"""The offline engine's side of `eagle3x.engines.vllm_offline`: vLLM in a process of its own, told what to do by lines.

Runs in vLLM's environment, as a script: imports vLLM and the standard library only. A message is a line of JSON on
stdin, its answers are lines of JSON on the descriptor that EAGLE3X_REPLY_FD names (1 and 2 are the log):

    {"op": "load", "arguments": {...}}                     -> {"report": {...}}
    {"op": "generate", "requests": [...]}                  -> {"completion": {...}} in order of completion
    {"op": "capture", "samples": [[token id, ...], ...]}   -> nothing: the states are in memory (`states_ring.py`)

each followed by {"done": true}, or {"error": ...} instead.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

BATCHES_AHEAD = 2
"""Requests given to the engine beforehand, in units of its largest batch."""


class Offline:
    """The loaded engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.ahead = BATCHES_AHEAD * self.engine.vllm_config.scheduler_config.max_num_seqs

    def report(self) -> dict[str, Any]:
        """What the workers say of themselves; they must agree."""
        reports = self.llm.collective_rpc("eagle3x_report")
        if any(report != reports[0] for report in reports):
            raise RuntimeError(f"the tensor-parallel workers differ: {reports}")
        return reports[0]

    def generate(self, requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Answer each. Nothing is streamed, so the first token's time is that of the whole answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        started: dict[str, float] = {}

        def add(request: dict[str, Any]) -> None:
            params = SamplingParams(
                max_tokens=request["max_tokens"],
                temperature=request["temperature"],
                top_p=request["top_p"],
                seed=request["seed"],
                ignore_eos=request["ignore_eos"],
                stop_token_ids=[] if request["ignore_eos"] else request["stop_token_ids"],
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            started[request["id"]] = time.perf_counter()
            self.engine.add_request(request["id"], {"prompt_token_ids": request["prompt_ids"]}, params)

        for finished in self._steps(iter(requests), add):
            end = time.perf_counter()
            for output in finished:
                answer, start = output.outputs[0], started.pop(output.request_id)
                reply = {"id": output.request_id, "token_ids": list(answer.token_ids), "finish": answer.finish_reason}
                yield {"completion": {**reply, "timing": [start, end, end]}}

    def capture(self, samples: list[list[int]]) -> None:
        """Let the engine read each. It waits while all of the memory waits for its reader."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        def add(numbered: tuple[int, list[int]]) -> None:
            number, token_ids = numbered
            params = SamplingParams(
                max_tokens=1,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"kv_transfer_params": {"sample": number}},  # the connector reads it
            )
            self.engine.add_request(f"states-{number}", {"prompt_token_ids": token_ids}, params)

        for _ in self._steps(enumerate(samples), add):
            pass

    def _steps(self, items: Iterator[Any], add: Callable[[Any], None]) -> Iterator[list[Any]]:
        """Give the engine its requests little by little, and yield what each of its steps finishes."""
        unfinished, more = 0, True
        while more or unfinished:
            while more and unfinished < self.ahead:
                item = next(items, None)
                if item is None:
                    more = False
                else:
                    add(item)
                    unfinished += 1
            finished = [output for output in self.engine.step() if output.finished]
            unfinished -= len(finished)
            yield finished


def main() -> None:
    """Obey until stdin ends."""
    replies = os.fdopen(int(os.environ["EAGLE3X_REPLY_FD"]), "w", buffering=1)
    offline: Offline | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["op"] == "load":
                offline = Offline(message["arguments"])
                say(replies, {"report": offline.report()})
            elif offline is None:
                raise RuntimeError("load comes first")
            elif message["op"] == "generate":
                for reply in offline.generate(message["requests"]):
                    say(replies, reply)
            elif message["op"] == "capture":
                offline.capture(message["samples"])
            else:
                raise RuntimeError(f"unknown op {message['op']}")
        except Exception as error:
            say(replies, {"error": f"{type(error).__name__}: {error}"})
            raise  # with the trace in the log: an engine that failed once is not used again
        say(replies, {"done": True})


def say(replies: TextIO, reply: dict[str, Any]) -> None:
    """One line."""
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
