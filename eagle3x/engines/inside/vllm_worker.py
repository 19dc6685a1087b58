"""The offline engine's side of `eagle3x.engines.vllm_offline`: vLLM in a process of its own, told what to do by lines.

Runs in vLLM's environment, as a script: imports vLLM and the standard library only. A message is a line of JSON on
stdin, its answers are lines of JSON on the descriptor that EAGLE3X_REPLY_FD names (1 and 2 are the log):

    {"op": "load", "arguments": {...}}        -> {"report": {...}}
    {"op": "generate", "requests": [...]}     -> {"completion": {...}} in order of completion
    {"op": "capture", "samples": [...]}       -> {"place": ..., "rows": [[id, first row, tokens], ...]} per engine step

each followed by {"done": true}, or {"error": ...} instead.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
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

        for finished in self._steps(requests, add):
            end = time.perf_counter()
            for output in finished:
                answer, start = output.outputs[0], started.pop(output.request_id)
                reply = {"id": output.request_id, "token_ids": list(answer.token_ids), "finish": answer.finish_reason}
                yield {"completion": {**reply, "timing": [start, end, end]}}

    def capture(self, samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Where in the ring the states of each are, or will be in a moment."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)

        def add(sample: dict[str, Any]) -> None:
            self.engine.add_request(sample["id"], {"prompt_token_ids": sample["token_ids"]}, params.clone())

        expected: dict[int, int] = {}
        for finished in self._steps(samples, add):
            steps: dict[int, list[Any]] = {}
            for output in finished:
                found = output.kv_transfer_params
                if found is None:
                    raise RuntimeError(f"vLLM answered {output.request_id} without saying where its states are")
                steps.setdefault(found["place"], []).append([output.request_id, found["start"], found["tokens"]])
                expected[found["place"]] = found["samples"]
            for place, rows in steps.items():  # all of them at once: the place is given back when they were read
                if len(rows) != expected[place]:
                    raise RuntimeError(f"{len(rows)} of a step's {expected[place]} samples finished with it")
                yield {"place": place, "rows": rows}

    def _steps(self, items: list[dict[str, Any]], add: Any) -> Iterator[list[Any]]:
        """Give the engine its requests little by little, and yield what each of its steps finishes."""
        waiting = iter(items)
        unfinished, more = 0, True
        while more or unfinished:
            while more and unfinished < self.ahead:
                item = next(waiting, None)
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
                for reply in offline.capture(message["samples"]):
                    say(replies, reply)
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
