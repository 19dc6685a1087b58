"""vLLM without a server, in a process of its own. Runs in vLLM's environment, as a script: `obey.py` says how."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from obey import obey

BATCHES_AHEAD = 2
"""Requests given to the engine beforehand, in units of its largest batch."""


class Offline:
    """The loaded engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._ahead = BATCHES_AHEAD * self._engine.vllm_config.scheduler_config.max_num_seqs

    def report(self) -> dict[str, Any]:
        """What the workers say of themselves; they must agree."""
        reports = self._llm.collective_rpc("eagle3x_report")
        if any(report != reports[0] for report in reports):
            raise RuntimeError(f"the tensor-parallel workers differ: {reports}")
        return reports[0]

    def generate(self, requests: list[dict[str, Any]], stop: list[int]) -> Iterator[dict[str, Any]]:
        """Answer each."""
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
                stop_token_ids=[] if request["ignore_eos"] else stop,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            started[request["id"]] = time.perf_counter()
            self._engine.add_request(request["id"], {"prompt_token_ids": request["prompt_ids"]}, params)

        for output in self._finished(iter(requests), add):
            end = time.perf_counter()
            answer, start = output.outputs[0], started.pop(output.request_id)
            reply = {"id": output.request_id, "token_ids": list(answer.token_ids), "finish": answer.finish_reason}
            yield {**reply, "timing": [start, end, end]}

    def capture(self, samples: list[list[int]]) -> None:
        """Let the engine read each."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        def add(numbered: tuple[int, list[int]]) -> None:
            number, token_ids = numbered
            params = SamplingParams(
                max_tokens=1,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"kv_transfer_params": {"sample": number}},  # for the connector
            )
            self._engine.add_request(f"states-{number}", {"prompt_token_ids": token_ids}, params)

        for _ in self._finished(enumerate(samples), add):
            pass

    def close(self) -> None:
        """Its processes end with this one."""

    def _finished(self, items: Iterator[Any], add: Callable[[Any], None]) -> Iterator[Any]:
        """Give the engine its requests little by little, and yield each output when it is finished."""
        unfinished, more = 0, True
        while more or unfinished:
            while more and unfinished < self._ahead:
                item = next(items, None)
                if item is None:
                    more = False
                else:
                    add(item)
                    unfinished += 1
            finished = [output for output in self._engine.step() if output.finished]
            unfinished -= len(finished)
            yield from finished


if __name__ == "__main__":
    obey(Offline)
