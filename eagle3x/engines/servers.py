"""The servers of one engine: started when first asked for, and kept for the passes that follow.

A start takes up to a minute, nearly all of it on one core, and the benchmark alternates between serving with and
without a drafter. So where two servers fit, both are started at the same time, and closing what was lent does not end
the server; it ends when its place is needed, or with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.types import Completion, Request, SpecCounters

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation

Served = tuple[Path | None, "Speculation | None"]
Start = Callable[[Path | None, "Speculation | None", Callable[[], bool]], ServerEndpoint]
"""Starts a server; it asks the last argument meanwhile, and gives up if that says False."""
PLAIN: Served = (None, None)


class Servers:
    """At most `at_once` servers, made by `start`."""

    def __init__(self, start: Start, at_once: int) -> None:
        self._start, self._at_once = start, at_once
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="server-start")
        self._running: dict[Served, Future[ServerEndpoint]] = {}
        self._ending: set[Served] = set()

    def prepare(self, drafter: Path | None, speculation: Speculation | None) -> None:
        """Start this server, and the one without a drafter too if both fit; does not wait for them."""
        wanted = (drafter, speculation)
        for served in (wanted, PLAIN) if self._at_once > 1 else (wanted,):
            if served not in self._running:
                self._make_room()
                self._ending.discard(served)
                self._running[served] = self._threads.submit(self._start, *served, partial(self._is_wanted, served))

    def lend(self, drafter: Path | None, speculation: Speculation | None) -> Lent:
        """The server for this drafter, once it is ready.

        Raises:
            EagleError: as `start`.
        """
        wanted = (drafter, speculation)
        self.prepare(*wanted)
        starting = self._running.pop(wanted)
        self._running[wanted] = starting  # the one that was not asked for longest comes first
        return Lent(starting.result())

    def close(self) -> None:
        """End them all."""
        while self._running:
            self._end(next(iter(self._running)))

    def _make_room(self) -> None:
        while len(self._running) >= self._at_once:
            self._end(next(iter(self._running)))

    def _is_wanted(self, served: Served) -> bool:
        return served not in self._ending

    def _end(self, served: Served) -> None:
        self._ending.add(served)
        starting = self._running.pop(served)
        if not starting.cancel() and starting.exception() is None:
            starting.result().close()


class Lent:
    """An endpoint whose server goes on when it is closed."""

    def __init__(self, endpoint: ServerEndpoint) -> None:
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
