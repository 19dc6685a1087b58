"""What the streams of all engines' servers have in common: server-sent events, and errors among them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx

from eagle3x.types import EagleError, Request


class ServerFailed(EagleError):  # noqa: N818 (it says what happened)
    """The server could not finish an answer through no fault of the request; it may be dying."""


async def ask(
    client: httpx.AsyncClient, path: str, request: Request, content: bytes
) -> AsyncGenerator[tuple[float, dict[str, Any]]]:
    """Post `content`, the JSON of `request`; yields the events of the answer, each with the time it was seen.

    Close it (`contextlib.aclosing`): the connection closes with it, and the server drops the request.

    Raises:
        EagleError: the server refuses the request. ServerFailed: it failed in the middle.
        httpx.TransportError: the connection broke.
    """
    headers = {"content-type": "application/json"}
    async with client.stream("POST", path, content=content, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            answer = (await response.aread()).decode(errors="replace")
            raise refused(request, response.status_code, answer)
        async for now, event in _events(response):
            if (error := event.get("error")) is not None:
                raise refused(request, int(error.get("code") or 500), json.dumps(event))
            yield now, event


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """The server-sent events, each with the time it was seen, up to `[DONE]`."""
    async for line in response.aiter_lines():
        now = time.perf_counter()
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        yield now, json.loads(line.removeprefix("data: "))
    raise ServerFailed("the server's stream ended without its end mark")


def refused(request: Request, status: int, answer: str) -> EagleError:
    """The error for an answer with an HTTP error status; servers send some of them in the stream."""
    try:
        message = json.loads(answer)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer[:500]
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return ServerFailed(f"request {request.id}: the server failed ({status}): {message}")
    return EagleError(f"request {request.id}: the server refuses it ({status}): {message}")
