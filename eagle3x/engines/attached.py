"""A server that somebody else started, as an `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from eagle3x.capture import Reader, native_layer_ids
from eagle3x.types import Completion, EagleError, HiddenStates, Request, TokenSample

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.engines.config import Backend
    from eagle3x.engines.server_endpoint import ServerEndpoint
    from eagle3x.targets import Target

Attach = Callable[[str, "Target", Path | None, "Speculation | None"], "ServerEndpoint"]
"""Attaches to the server at a URL, which must serve the target, and speculate as it is said here."""


class AttachedServer:
    """It answers as it serves, and nothing else can be had from it. `reader`: how its engine reads ids of layers."""

    can_serve_both = False
    can_serve_plain = False

    def __init__(self, url: str, target: Target, batch_size: int, attach: Attach, reader: Reader) -> None:
        self._url, self._target, self._batch_size = url, target, batch_size
        self._attach, self._reader = attach, reader
        self._served: tuple[Path | None, Speculation | None] = (None, None)

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answer the requests by the server, as it speculates."""
        if requests:
            with self._attach(self._url, self._target, *self._served) as endpoint:
                yield from endpoint.complete(requests, self._batch_size)

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """Raises EagleError: a server hands out no states."""
        raise EagleError(f"{self._url}: a server hands out no hidden states; capture with a backend started here")

    def serve(self, drafter: Path | None, speculation: Speculation | None) -> ServerEndpoint:
        """The server, whose drafter must be the one in directory `drafter`: nobody can look into it.

        Raises:
            EagleError: it does not serve the target, or speculates in another way.
        """
        self._served = (drafter, speculation)
        return self._attach(self._url, self._target, drafter, speculation)

    def native_layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """As the server's engine and version."""
        return native_layer_ids(self._reader, boundaries, self._target.num_blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The server goes on."""


def attached_refusals(backend: Backend, ask: Callable[[str], object]) -> list[str]:
    """Settings of the serve slot that a server which already runs cannot take, and whether one answers `ask` there."""
    reasons = [
        f"serve.backend.{name}={getattr(backend, name)}: is for a server that is started; serve.backend.url attaches to"
        " one that runs; use null"
        for name in ("port", "python")
        if getattr(backend, name) is not None
    ]
    if backend.engine_args:
        reasons.append("serve.backend.engine_args: the server at serve.backend.url was started with its own; use {}")
    try:
        ask(str(backend.url))
    except EagleError as error:
        reasons.append(f"serve.backend.url={backend.url}: {error}")
    return reasons
