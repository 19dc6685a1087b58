"""The servers of one engine: started when first asked for, and kept for the passes that follow.

A start takes up to a minute and the benchmark alternates between serving with and without a drafter, so closing what
was lent does not end the server; it ends when its place is needed, or with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from eagle3x.engines.openai_endpoint import OpenAIEndpoint
from eagle3x.types import Completion, Request, SpecCounters

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation

Start = Callable[[Path | None, "Speculation | None"], OpenAIEndpoint]
Served = tuple[Path | None, "Speculation | None"]


class Servers:
    """At most `at_once` servers, made by `start`."""

    def __init__(self, start: Start, at_once: int) -> None:
        self._start, self._at_once = start, at_once
        self._running: dict[Served, OpenAIEndpoint] = {}

    def lend(self, drafter: Path | None, speculation: Speculation | None) -> Lent:
        """The server for this drafter; the one that was not asked for longest makes room."""
        wanted = (drafter, speculation)
        endpoint = self._running.pop(wanted, None)
        if endpoint is None:
            while len(self._running) >= self._at_once:
                self._running.pop(next(iter(self._running))).close()
            endpoint = self._start(drafter, speculation)
        self._running[wanted] = endpoint
        return Lent(endpoint)

    def close(self) -> None:
        """End them all."""
        while self._running:
            self._running.popitem()[1].close()


class Lent:
    """An endpoint whose server goes on when it is closed."""

    def __init__(self, endpoint: OpenAIEndpoint) -> None:
        self._endpoint = endpoint
        self.counts_past_stop = endpoint.counts_past_stop
        self.per_request_counters = endpoint.per_request_counters

    def complete(self, requests: Sequence[Request], concurrency: int) -> Iterator[Completion]:
        """As the endpoint."""
        return self._endpoint.complete(requests, concurrency)

    def totals(self) -> SpecCounters | None:
        """As the endpoint."""
        return self._endpoint.totals()

    def flush_prefix_cache(self) -> None:
        """As the endpoint."""
        self._endpoint.flush_prefix_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The server's next borrower finds it as it is."""
