"""Using a vLLM server that already runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.engines import spec_metrics
from eagle3x.engines.openai_stream import OpenAIDialect
from eagle3x.engines.server import Server, fetch
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.types import EagleError, Request

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.targets import Target


def attached_version(url: str) -> str:
    """The version that the vLLM server at `url` tells."""
    return json.loads(fetch(url, "/version"))["version"]


def attach(url: str, target: Target, drafter: Path | None, speculation: Speculation | None) -> ServerEndpoint:
    """Use the server at `url`, which must speculate if and only if `speculation` says so, with as many tokens.

    vLLM tells nothing of its weights (nor of `drafter`), attention, quantization or runner over HTTP: they are what its
    user says.

    Raises:
        EagleError: no server is ready there, or it serves something else.
    """
    server = Server.attach(url)
    name = served_model(json.loads(fetch(server.url, "/v1/models")), target, server.url)
    counters = spec_metrics.totals(fetch(server.url, "/metrics"))
    serves = None if counters is None else len(counters.accepted_at)
    wanted = None if speculation is None else speculation.num_speculative_tokens
    if serves != wanted:
        raise EagleError(
            f"serve.backend.url={server.url}: the server speculates with {_tokens(serves)}, but"
            f" {_tokens(wanted)} was asked for"
        )
    dialect = OpenAIDialect(name, target.eos_token_ids)
    endpoint = ServerEndpoint(server, dialect, per_request_counters=False, prefix_cache=True)
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
