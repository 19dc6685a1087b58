"""One generation over SGLang's own /generate: token ids in, token ids out, with the times of its stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from eagle3x.engines.server_stream import ServerFailed, ask
from eagle3x.engines.sglang_metrics import request_counters, verify_steps
from eagle3x.types import Completion, EagleError, Finish, Request, SpecCounters, Timing

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.targets import Target

PATH = "/generate"
FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}


class GenerateDialect:
    """How an SGLang server that serves `target` is asked.

    `speculation`: as it speculates; None: it does not. `metrics`: whether it has /metrics.
    """

    def __init__(self, target: Target, speculation: Speculation | None, *, metrics: bool) -> None:
        self._target, self._speculation, self._metrics = target, speculation, metrics
        self._ours = None if speculation is None else SpecCounters.zero(speculation.num_speculative_tokens)

    def body(self, request: Request, salt: str | None) -> dict[str, Any]:
        """The request as JSON. Every sampling parameter is sent: what is left out would be the server's own default.

        `ignore_eos` switches off the stop tokens that are named, too. SGLang does not look whether a prompt's ids are
        in the vocabulary, and ends on one that is not.

        Raises:
            EagleError: a token that the target does not have.
        """
        size = self._target.vocab_size
        if wrong := [token for token in request.prompt_ids if not 0 <= token < size]:
            raise EagleError(f"request {request.id}: token {wrong[0]} is out of the target's vocabulary of {size}")
        asked: dict[str, Any] = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                "max_new_tokens": request.max_tokens,
                "ignore_eos": request.ignore_eos,
                "stop_token_ids": [] if request.ignore_eos else list(self._target.eos_token_ids),
                "no_stop_trim": True,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "sampling_seed": request.seed,
            },
            "stream": True,
        }
        if request.top2_gaps:
            asked |= {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
        if salt is not None:
            asked["extra_key"] = salt
        return asked

    async def complete(self, client: httpx.AsyncClient, request: Request, asked: Mapping[str, Any]) -> Completion:
        """Send `asked`, the body of `request`, and read its answer, timed by this process's performance counter.

        Raises:
            EagleError: the server refuses the request, or answers in another form than SGLang does.
            ServerFailed: the server failed in the middle.
            httpx.TransportError: the connection broke.
        """
        content = json.dumps(asked).encode()
        start = time.perf_counter()
        answer = _Answer(request)
        async with aclosing(ask(client, PATH, request, content)) as events:
            async for now, event in events:
                answer.read(now, event)
        completion = answer.completion(start, self._target.eos_token_ids, self._speculation)
        if self._ours is not None and completion.counters is not None:
            self._ours += completion.counters
        return completion

    def totals(self, get: Callable[[str], str]) -> SpecCounters | None:
        """Verify steps since the server started, and what was accepted in ours; None without a drafter.

        More verify steps than ours have had are another user's. A server without /metrics does not show them.
        """
        if self._ours is None or not self._metrics:
            return self._ours
        return SpecCounters(verify_steps(get("/metrics")), self._ours.drafted, self._ours.accepted_at)


@dataclass
class _Answer:
    """What was read of an answer so far. `seen`: when its first and its last tokens were."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def read(self, now: float, event: Mapping[str, Any]) -> None:
        """Take in an event that was seen at `now`: all tokens so far or, by the server's settings, the new ones."""
        ids, self.meta = event["output_ids"], event["meta_info"]
        if len(ids) == self.meta["completion_tokens"]:
            self.token_ids, self.gaps = [], []
        if ids:
            self.seen = [*self.seen[:1], now]
            self.token_ids += ids
        if self.request.top2_gaps:
            self.gaps += [_gap(top) for top in self.meta["output_top_logprobs"][: len(ids)]]

    def completion(self, start: float, eos_token_ids: tuple[int, ...], speculation: Speculation | None) -> Completion:
        """The whole answer."""
        request, reason = self.request, self.meta.get("finish_reason") or {}
        if (finish := FINISHES.get(reason.get("type", ""))) is None:
            raise ServerFailed(f"request {request.id}: the server gave up (finish_reason {json.dumps(reason)})")
        if len(self.token_ids) != self.meta["completion_tokens"] or not self.token_ids:
            raise EagleError(
                f"request {request.id}: the server says that it wrote {self.meta['completion_tokens']} tokens, and sent"
                f" {len(self.token_ids)}"
            )
        if finish == "stop" and self.token_ids[-1] not in eos_token_ids:
            raise EagleError(
                f"request {request.id}: the server stopped at token {self.token_ids[-1]}, which is none of the target's"
                f" stop tokens {list(eos_token_ids)}: its tokenizer or config names others"
            )
        if finish == "length" and len(self.token_ids) != request.max_tokens:
            raise EagleError(
                f"request {request.id}: the server ended it after {len(self.token_ids)} of {request.max_tokens} tokens:"
                " its context is too short"
            )
        if request.top2_gaps and len(self.gaps) != len(self.token_ids):
            raise EagleError(f"request {request.id}: {len(self.gaps)} log-probabilities, {len(self.token_ids)} tokens")
        return Completion(
            request.id,
            tuple(self.token_ids),
            finish,
            Timing(start, self.seen[0], self.seen[-1]),
            None if speculation is None else request_counters(self.meta, speculation),
            self.meta.get("cached_tokens"),
            tuple(self.gaps) if request.top2_gaps else None,
        )


def _gap(top: list[tuple[float, int, str | None]]) -> float:
    """Of the two largest log-probabilities, as of their logits."""
    first, second = sorted((value for value, _, _ in top), reverse=True)[:2]
    return first - second
