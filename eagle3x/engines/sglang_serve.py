"""Starting SGLang's HTTP server, and making sure that it runs as it was asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3x.engines.sglang_endpoint import SglangEndpoint

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.engines.interpreter import EngineInterpreter
    from eagle3x.targets import Target

CAPACITY = ("chunked_prefill_size", "context_length", "max_prefill_tokens", "max_running_requests", "max_total_tokens")
"""What SGLang would choose by the memory that is left, of which a drafter takes some."""
DRAFT_ROOM = 256
"""Tokens of KV cache for each request's drafts, whether it speculates or not: both sides have the same cache."""


@dataclass(frozen=True)
class Launch:
    """A server to start.

    `arguments`: SGLang's ServerArgs by name, alike with and without a drafter; each of `CAPACITY` must be there.
    `environment` is added to this process's. `attention` and `quantization` are what SGLang must report for prefill and
    decode, in its own words ("fa3", "intel_amx"; None or "fp8"). `log` is appended to. `timeout`: seconds until it must
    be ready.

    Raises:
        ValueError: an argument of `CAPACITY` is missing.
    """

    interpreter: EngineInterpreter
    target: Target
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    device: Literal["cpu", "cuda"]
    attention: str
    quantization: str | None
    log: Path
    timeout: float
    port: int | None = None

    def __post_init__(self) -> None:
        if missing := [name for name in CAPACITY if name not in self.arguments]:
            raise ValueError(f"arguments lack {', '.join(missing)}: both sides of a comparison need the same capacity")


def capacity(max_running_requests: int, context_length: int, prefill_tokens: int) -> dict[str, int]:
    """The arguments of `CAPACITY` with which every sequence fits at its full length, drafts included.

    `prefill_tokens`: prompt tokens of one step.
    """
    return {
        "chunked_prefill_size": prefill_tokens,
        "context_length": context_length,
        "max_prefill_tokens": prefill_tokens,
        "max_running_requests": max_running_requests,
        "max_total_tokens": max_running_requests * (context_length + DRAFT_ROOM),
    }


def serve(
    launch: Launch,
    drafter: Path | None,
    speculation: Speculation | None,
    wanted: Callable[[], bool] = lambda: True,
) -> SglangEndpoint:
    """Start a server, with the exported drafter in directory `drafter` if one is given, and check it.

    `wanted`: asked while it starts; False ends it.

    Raises:
        EngineDied: it ended before it was ready; the message has the end of its log.
        EagleError: it was not ready in time, or runs in another way than was asked.
    """
    raise NotImplementedError
