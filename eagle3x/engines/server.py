"""An HTTP server that answers for an engine: one that we start, or one that already runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

from eagle3x import progress
from eagle3x.engines.child import Child, EngineDied
from eagle3x.engines.offline import INSIDE
from eagle3x.engines.ports import HIGHEST, LOOPBACK, free_port, listens, taken
from eagle3x.types import EagleError

SCRIPT = INSIDE / "engine_server.py"
"""Starts an engine's own server; its first argument is the server's module."""

PORT_TRIES = 5
POLL_SECONDS = 0.25
FETCH_SECONDS = 60.0
"""How long a server may take to tell of itself; it answers between two steps of its own."""
ANSWER_SECONDS = 10.0
"""How long a running server may take for its health check; it answers others meanwhile."""


class Server:
    """A server at `url` (no path, no slash at the end). Made by `launch` or `attach`; a context manager that stops it.

    `child`: the process that `launch` started; None where we attached.
    """

    def __init__(self, url: str, health: str, child: Child | None) -> None:
        self.url = url
        self.child = child
        self._health = health

    @classmethod
    def launch(
        cls,
        argv_for_port: Callable[[int], Sequence[str]],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        timeout: float,
        port: int | None = None,
        highest_port: int = HIGHEST,
        health: str = "/health",
        wanted: Callable[[], bool] = lambda: True,
    ) -> Server:
        """Start a server on 127.0.0.1 and wait until `health` answers 200, at most `timeout` seconds.

        `argv_for_port`: the command line for a port, which must bind 127.0.0.1. `port`: None takes a free one, up to
        `highest_port`; if another program gets that port first, another is tried. `env` is added to this process's
        environment. `wanted`: asked while it starts; False ends it.

        Raises:
            EngineDied: it ended before it was ready; the message has the end of its log.
            EagleError: `port` is taken, or it was not ready in time. Nothing of it runs any more then.
        """
        if port is not None:
            if taken(port):
                raise EagleError(f"backend.port={port}: another program listens there; name a free port, or null")
            return cls._launched(argv_for_port, port, log, env, timeout, health, wanted)
        for _ in range(PORT_TRIES - 1):
            chosen = free_port(highest_port)
            try:
                return cls._launched(argv_for_port, chosen, log, env, timeout, health, wanted)
            except EngineDied:
                if not taken(chosen):
                    raise
                progress.log(f"port {chosen} was taken by another program before the server got it: trying another")
        return cls._launched(argv_for_port, free_port(highest_port), log, env, timeout, health, wanted)

    @classmethod
    def attach(cls, url: str, health: str = "/health") -> Server:
        """Use the server at `url`, which stays as it is when this object is stopped.

        Raises:
            EagleError: `url` is not the address of a server, or `health` does not answer 200 there.
        """
        parts = urlsplit(url)
        named = "serve.backend.url"
        if "@" in parts.netloc:
            raise EagleError(f"{named}: a name or password in the URL would end up in logs; leave it out")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EagleError(f"{named}={url}: must be http://HOST:PORT")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise EagleError(f"{named}={url}: must name the server alone, {parts.scheme}://{parts.netloc}")
        server = cls(f"{parts.scheme}://{parts.netloc}", health, None)
        if (wrong := server._ill()) is not None:
            raise EagleError(f"{named}={url}: no server is ready there ({wrong}); start it, or use null to launch one")
        return server

    def check(self) -> None:
        """Raise if the server is gone.

        Raises:
            EngineDied: the process ended (with how its log ends), or the attached server does not answer.
        """
        if self.child is not None:
            self.child.require_running(f"the server at {self.url}")
        elif (wrong := self._ill()) is not None:
            raise EngineDied(f"the server at {self.url} (serve.backend.url) is no longer ready: {wrong}")

    def stop(self) -> None:
        """End what `launch` started; its port is free then. Leaves an attached server alone."""
        if self.child is not None:
            self.child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @classmethod
    def _launched(
        cls,
        argv_for_port: Callable[[int], Sequence[str]],
        port: int,
        log: Path,
        env: Mapping[str, str] | None,
        timeout: float,
        health: str,
        wanted: Callable[[], bool],
    ) -> Server:
        server = cls(f"http://{LOOPBACK}:{port}", health, child := Child(argv_for_port(port), log, env))
        try:
            with _waiting(f"the server at {server.url} starts (log: {log})", timeout) as tell:
                deadline = time.monotonic() + timeout
                # Another program may have got the port and answer in our server's place.
                while not (listens(child.processes(), port) and server._ill() is None):
                    server.check()
                    if not wanted():
                        raise EagleError(f"the server at {server.url} was ended before it was ready: nobody wants it")
                    if time.monotonic() > deadline:
                        raise EagleError(
                            f"backend.start_timeout={timeout:g}: the server at {server.url} was not ready within that"
                            f" many seconds (raise it if it only needs longer){child.log_end()}"
                        )
                    tell()
                    time.sleep(POLL_SECONDS)
        except BaseException:
            server.stop()
            raise
        return server

    def _ill(self) -> str | None:
        """Why the server is not ready; None if it is."""
        # Proxies are for the world outside, not for this machine's own address.
        with httpx.Client(trust_env=self.child is None, timeout=ANSWER_SECONDS) as client:
            try:
                status = client.get(self.url + self._health).status_code
            except httpx.HTTPError as error:
                return f"{self._health}: {type(error).__name__}: {error}"
        return None if status == httpx.codes.OK else f"{self._health} answered {status}"


def fetch(url: str, path: str) -> str:
    """What the server at `url` answers to a GET of `path`.

    Raises:
        EagleError: an error, or nothing.
    """
    try:
        answer = httpx.get(url + path, timeout=FETCH_SECONDS)
    except httpx.HTTPError as error:
        raise EagleError(f"{url}{path}: {type(error).__name__}: {error}") from error
    if answer.status_code != httpx.codes.OK:
        raise EagleError(f"{url}{path} answered {answer.status_code}: {answer.text[:500]}")
    return answer.text


@contextlib.contextmanager
def _waiting(what: str, timeout: float) -> Iterator[Callable[[], None]]:
    """Show that we wait: a spinner on a terminal, else a line now and then. What it yields is to be called often."""
    start = last = time.monotonic()
    if sys.stderr.isatty():
        with progress.console.status(what) as status:
            yield lambda: status.update(f"{what}: {time.monotonic() - start:.0f} of {timeout:g} s")
        return

    def tell() -> None:
        nonlocal last
        if time.monotonic() - last > progress.PLAIN_SECONDS:
            last = time.monotonic()
            progress.log(f"{what}: {last - start:.0f} of {timeout:g} s")

    yield tell
