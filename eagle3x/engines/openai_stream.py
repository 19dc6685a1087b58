"""One completion over the OpenAI API of a vLLM server: token ids in, token ids out, with the times of its stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from eagle3x.engines import spec_metrics
from eagle3x.engines.server_stream import ServerFailed, ask
from eagle3x.types import Completion, EagleError, Finish, Request, SpecCounters, Timing

PATH = "/v1/completions"
FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class OpenAIDialect:
    """How vLLM's server is asked. `model`: the name it serves. `stop_token_ids` end an answer, unless the request
    ignores them."""

    model: str
    stop_token_ids: tuple[int, ...]

    def body(self, request: Request, salt: str | None) -> dict[str, Any]:
        """The request as JSON; see `body`."""
        return body(request, self.model, self.stop_token_ids, salt)

    async def complete(self, client: httpx.AsyncClient, request: Request, asked: Mapping[str, Any]) -> Completion:
        """Send it and read the answer; see `complete`."""
        return await complete(client, request, asked)

    def totals(self, get: Callable[[str], str]) -> SpecCounters | None:
        """The counters since the server started; None without a drafter. vLLM records a step after it has sent it."""
        return spec_metrics.totals(get("/metrics"))


def body(request: Request, model: str, stop_token_ids: Sequence[int], cache_salt: str | None) -> dict[str, Any]:
    """The request as JSON. Every sampling parameter is sent: what is left out would be the server's own default.

    The server's stop tokens (`ignore_eos` switches them off) are those of its own configuration, so ours are named.
    """
    asked: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "stop_token_ids": [] if request.ignore_eos else list(stop_token_ids),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.top2_gaps:
        # Ids as names: two tokens may have the same text.
        asked |= {"logprobs": 2, "return_tokens_as_token_ids": True}
    if cache_salt is not None:
        asked["cache_salt"] = cache_salt
    return asked


async def complete(client: httpx.AsyncClient, request: Request, asked: Mapping[str, Any]) -> Completion:
    """Send `asked`, the body of `request`, and read its answer. Times are of this process's performance counter.

    Raises:
        EagleError: the server refuses the request, or answers in another form than vLLM does.
        ServerFailed: the server failed in the middle.
        httpx.TransportError: the connection broke.
    """
    content = json.dumps(asked).encode()
    start = time.perf_counter()
    answer = _Answer(request)
    async with aclosing(ask(client, PATH, request, content)) as events:
        async for now, event in events:
            answer.read(now, event)
    return answer.completion(start)


@dataclass
class _Answer:
    """What was read of an answer so far. `seen`: when its first and its last tokens were."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    finish: str | None = None
    counters: SpecCounters | None = None
    cached_tokens: int | None = None

    def read(self, now: float, event: Mapping[str, Any]) -> None:
        """Take in an event that was seen at `now`."""
        for choice in event["choices"]:
            ids = choice.get("token_ids")
            if ids is None:
                raise EagleError(
                    f"request {self.request.id}: the server sends text without token ids; serve with a vLLM that knows"
                    " return_token_ids"
                )
            if ids:
                self.seen = [*self.seen[:1], now]
                self.token_ids += ids
            if self.request.top2_gaps and ids:
                self.gaps += [_gap(top) for top in choice["logprobs"]["top_logprobs"]]
            self.finish = choice.get("finish_reason") or self.finish
        if (usage := event.get("usage")) is not None:
            details = usage.get("prompt_tokens_details")
            self.cached_tokens = None if details is None else details.get("cached_tokens")
        if (figures := (event.get("metrics") or {}).get("speculative_decoding")) is not None:
            self.counters = spec_metrics.request_counters(figures)

    def completion(self, start: float) -> Completion:
        """The whole answer."""
        if self.finish not in FINISHES:
            raise ServerFailed(f"request {self.request.id}: the server gave up (finish_reason {self.finish})")
        if not self.token_ids:
            raise EagleError(f"request {self.request.id}: the server answered without a token")
        return Completion(
            self.request.id,
            tuple(self.token_ids),
            FINISHES[self.finish],
            Timing(start, self.seen[0], self.seen[-1]),
            self.counters,
            self.cached_tokens,
            tuple(self.gaps) if self.request.top2_gaps else None,
        )


def _gap(top: Mapping[str, float]) -> float:
    """Of the two largest log-probabilities, as of their logits. vLLM may have added the sampled token as a third."""
    first, second = sorted(top.values(), reverse=True)[:2]
    return first - second
