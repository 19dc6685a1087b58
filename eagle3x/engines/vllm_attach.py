"""Using a vLLM server that already runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from eagle3x.capture import Reader, native_layer_ids
from eagle3x.engines import spec_metrics
from eagle3x.engines.openai_endpoint import METRICS_SECONDS, OpenAIEndpoint
from eagle3x.engines.server import Server
from eagle3x.types import Completion, EagleError, HiddenStates, Request, TokenSample

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.engines.base import Endpoint
    from eagle3x.engines.config import Backend
    from eagle3x.targets import Target


class AttachedVllm:
    """A vLLM server that somebody else started: it answers as it serves, and nothing else can be had from it."""

    can_serve_both = False
    can_serve_plain = False

    def __init__(self, url: str, target: Target, batch_size: int) -> None:
        self._url, self._target, self._batch_size = url, target, batch_size
        self._speculation: Speculation | None = None

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answer the requests by the server, as it speculates."""
        if requests:
            with attach(self._url, self._target, self._speculation) as endpoint:
                yield from endpoint.complete(requests, self._batch_size)

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """Raises EagleError: a server hands out no states."""
        raise EagleError(f"{self._url}: a server hands out no hidden states; capture with a backend started here")

    def serve(self, drafter: Path | None, speculation: Speculation | None) -> Endpoint:
        """The server, whose drafter must be the one in directory `drafter`: nobody can look.

        Raises:
            EagleError: it does not serve the target, or does not speculate with as many tokens.
        """
        self._speculation = speculation
        return attach(self._url, self._target, speculation)

    def native_layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """As every vLLM."""
        reader = Reader("vllm", attached_version(self._url), runner="v1")
        return native_layer_ids(reader, boundaries, self._target.num_blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The server goes on."""


def attached_refusals(backend: Backend) -> list[str]:
    """Settings of the serve slot that a server which already runs cannot take, and whether one answers there."""
    reasons = [
        f"serve.backend.{name}={getattr(backend, name)}: is for a server that is started; serve.backend.url attaches to"
        " one that runs; use null"
        for name in ("port", "python")
        if getattr(backend, name) is not None
    ]
    if backend.engine_args:
        reasons.append("serve.backend.engine_args: the server at serve.backend.url was started with its own; use {}")
    try:
        attached_version(str(backend.url))
    except EagleError as error:
        reasons.append(f"serve.backend.url={backend.url}: {error}")
    return reasons


def attached_version(url: str) -> str:
    """The version that the vLLM server at `url` tells."""
    with httpx.Client(base_url=url, timeout=METRICS_SECONDS) as client:
        return json.loads(_text(client, "/version"))["version"]


def attach(url: str, target: Target, speculation: Speculation | None) -> OpenAIEndpoint:
    """Use the server at `url`, which must speculate if and only if `speculation` says so, with as many tokens.

    vLLM tells nothing of its weights, attention, quantization or runner over HTTP: they are what its user says.

    Raises:
        EagleError: no server is ready there, or it serves something else.
    """
    server = Server.attach(url)
    with httpx.Client(base_url=server.url, timeout=METRICS_SECONDS) as client:
        name = served_model(json.loads(_text(client, "/v1/models")), target, server.url)
        counters = spec_metrics.totals(_text(client, "/metrics"))
    serves = None if counters is None else len(counters.accepted_at)
    wanted = None if speculation is None else speculation.num_speculative_tokens
    if serves != wanted:
        raise EagleError(
            f"serve.backend.url={server.url}: the server speculates with {_tokens(serves)}, but"
            f" {_tokens(wanted)} was asked for"
        )
    endpoint = OpenAIEndpoint(server, name, target.eos_token_ids, per_request_counters=False, prefix_cache=True)
    if counters is not None:
        try:
            probe = Request("probe", (target.eos_token_ids[0],), max_tokens=2, ignore_eos=True)
            endpoint.per_request_counters = next(endpoint.complete([probe], 1)).counters is not None
        except BaseException:
            endpoint.close()
            raise
    return endpoint


def served_model(models: Mapping[str, Any], target: Target, url: str) -> str:
    """The name under which the server has `target`: its only model that is no adapter, or the one called alike."""
    bases = [m for m in models["data"] if m.get("parent") is None]
    alike = [m for m in bases if {m["id"], m.get("root")} & {target.name, str(target.path)}]
    found = alike or bases
    if len({m.get("root") or m["id"] for m in found}) != 1:
        names = ", ".join(m["id"] for m in bases) or "no model"
        raise EagleError(f"serve.backend.url={url}: the server has {names}; target.name must be one of them")
    return found[0]["id"]


def _tokens(number: int | None) -> str:
    return "no speculative tokens" if number is None else f"num_speculative_tokens={number}"


def _text(client: httpx.Client, path: str) -> str:
    try:
        answer = client.get(path)
    except httpx.TransportError as error:
        raise EagleError(f"{client.base_url}{path}: {type(error).__name__}: {error}") from error
    if answer.status_code != httpx.codes.OK:
        raise EagleError(f"{client.base_url}{path} answered {answer.status_code}: {answer.text[:500]}")
    return answer.text
