"""A server as an `Endpoint`, over HTTP, whatever engine runs there: its `Dialect` knows how it is asked.

Requests run on one asyncio loop in a thread of its own, so that a stream which nobody waits for any more can be closed
at once: that makes the server drop its request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import httpx

from eagle3x.engines.server import FETCH_SECONDS, Server
from eagle3x.engines.server_stream import ServerFailed
from eagle3x.types import Completion, EagleError, Request, SpecCounters

T = TypeVar("T")
Asked = tuple[Request, dict[str, Any]]
"""A request, and its body."""

CONNECT_SECONDS = 30.0
CHECK_SECONDS = 15.0
"""A server that has not finished a request for so long is asked whether it lives."""
DYING_SECONDS = 10.0
"""A server whose connection broke has so long to be seen dead: its parts do not end at one moment."""
POLL_SECONDS = 0.1


class Dialect(Protocol):
    """How an engine's server is asked."""

    def body(self, request: Request, salt: str | None) -> dict[str, Any]:
        """The request as JSON. Prompts with different salts share nothing in a prefix cache.

        Raises:
            EagleError: a request that the server cannot answer rightly.
        """
        ...

    async def complete(self, client: httpx.AsyncClient, request: Request, asked: Mapping[str, Any]) -> Completion:
        """Send `asked`, the body of `request`, and read its answer, timed by this process's performance counter.

        Raises:
            EagleError: the server refuses the request, or answers in another form than its engine does.
            ServerFailed: the server failed in the middle.
            httpx.TransportError: the connection broke.
        """
        ...

    def totals(self, get: Callable[[str], str]) -> SpecCounters | None:
        """The counters since the server started, by `get` of its paths; None without a drafter."""
        ...


class ServerEndpoint:
    """A server that answers requests. Closing it stops the server, if we launched it.

    `per_request_counters`: whether its responses carry what was accepted. `prefix_cache`: whether it has one; then the
    prompts of each pass carry a salt of their own, which lets them meet no earlier prompt there. (To reset the cache of
    a server that is not ours would take it from its other users.)
    `sampling_refused`: why requests at a temperature above 0 are refused; None if they are not.
    """

    counts_past_stop = True

    def __init__(
        self,
        server: Server,
        dialect: Dialect,
        *,
        per_request_counters: bool,
        prefix_cache: bool,
        sampling_refused: str | None = None,
    ) -> None:
        self.server = server
        self.per_request_counters = per_request_counters
        self._dialect = dialect
        self._prefix_cache = prefix_cache
        self._salt: str | None = None
        self._sampling_refused = sampling_refused
        # Proxies are for the world outside, not for this machine's own address. An answer may take any time.
        settings: dict[str, Any] = {
            "base_url": server.url,
            "trust_env": server.child is None,
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
        }
        self._control = httpx.Client(timeout=FETCH_SECONDS, **settings)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_SECONDS), **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-endpoint", daemon=True)
        self._thread.start()
        self.flush_prefix_cache()

    def complete(self, requests: Sequence[Request], concurrency: int) -> Iterator[Completion]:
        """Answer the requests, in order, at most `concurrency` at a time; yields in order of completion.

        Raises:
            EagleError: a request that cannot be answered rightly here, or that the server refuses.
            EngineDied: the server ended; the message has the end of its log.
        """
        if self._sampling_refused is not None and (sampled := [r for r in requests if r.temperature > 0]):
            raise EagleError(
                f"request {sampled[0].id} has temperature {sampled[0].temperature:g}: {self._sampling_refused}"
            )
        asked = [(request, self._dialect.body(request, self._salt)) for request in requests]
        return self._completions(asked, concurrency)

    def totals(self) -> SpecCounters | None:
        """The counters since the server started; None without a drafter."""
        return self._dialect.totals(self.get)

    def flush_prefix_cache(self) -> None:
        """Make the next requests meet nothing in the prefix cache but each other."""
        if self._prefix_cache:
            self._salt = uuid.uuid4().hex

    def get(self, path: str) -> str:
        """The server's answer to a GET.

        Raises:
            EagleError: it answers with an error.
            EngineDied: it ended.
        """
        try:
            answer = self._control.get(path)
        except httpx.TransportError as error:
            raise self._broken(error) from error
        if answer.status_code != httpx.codes.OK:
            raise EagleError(f"{self.server.url}{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer.text

    def close(self) -> None:
        """Stop the server if we launched it, and let go of its connections. Again: does nothing."""
        if self._loop.is_closed():
            return
        try:
            self._in_loop(self._client.aclose()).result()
            self._in_loop(self._loop.shutdown_asyncgens()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._control.close()
        finally:
            self.server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _completions(self, asked: Sequence[Asked], concurrency: int) -> Iterator[Completion]:
        done: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        answers = self._in_loop(self._answer_all(asked, concurrency, done))
        try:
            while True:
                try:
                    completion = done.get(timeout=CHECK_SECONDS)
                except queue.Empty:
                    self.server.check()
                    continue
                if completion is None:
                    break
                yield completion
            answers.result()
        except (httpx.TransportError, ServerFailed) as error:
            raise self._broken(error) from error
        finally:
            # Once: a second cancellation would hit the closing of a connection, which then stays open.
            answers.cancel()
            self._in_loop(_all_ended()).result()

    async def _answer_all(
        self, asked: Sequence[Asked], concurrency: int, done: queue.SimpleQueue[Completion | None]
    ) -> None:
        """Put every completion into `done`, and None once no more will come; the first error ends all."""
        todo = iter(asked)

        async def work() -> None:
            for request, body in todo:
                done.put(await self._dialect.complete(self._client, request, body))

        workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, len(asked)))]
        try:
            await asyncio.gather(*workers)
        except Exception:
            for worker in workers:
                worker.cancel()
            raise
        finally:
            done.put(None)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _broken(self, error: Exception) -> EagleError:
        """What to say of a broken connection. Raises EngineDied if the server ended."""
        deadline = time.monotonic() + DYING_SECONDS
        while time.monotonic() < deadline:
            self.server.check()
            time.sleep(POLL_SECONDS)
        if isinstance(error, ServerFailed):
            return error
        return EagleError(
            f"the connection to {self.server.url} broke ({type(error).__name__}: {error}), but the server still runs"
        )


async def _all_ended() -> None:
    """Wait until nothing else runs in this loop."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
