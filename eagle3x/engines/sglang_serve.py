"""Starting SGLang's HTTP server, and making sure that it runs as it was asked to.

SGLang resolves what it was asked for against the model, the device and what is installed, and logs what it changed. So
what it says of itself is compared with what was asked, before it answers anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3x.engines.flags import flags
from eagle3x.engines.ports import LOOPBACK
from eagle3x.engines.server import SCRIPT, Server
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.engines.sglang_report import ALGORITHM, Asked, compared, read
from eagle3x.engines.sglang_stream import GenerateDialect
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.engines.interpreter import EngineInterpreter
    from eagle3x.targets import Target

CAPACITY = ("chunked_prefill_size", "context_length", "max_prefill_tokens", "max_running_requests", "max_total_tokens")
"""What SGLang would choose by the memory that is left, of which a drafter takes some."""
ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # `-m` would look for packages in the working directory first
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # to ask whether it lives would cost it a step, and a second
}
AS_IT_IS = "unquant"
"""Of `speculative_draft_model_quantization`: the drafter as its checkpoint has it."""
PAGE = 128
"""Tokens of the largest page of a KV cache that an attention backend wants; SGLang cuts its cache to whole pages."""
HIGHEST_PORT = 55535
"""0.5.14 derives a port 10,000 above its own, used or not, and does not start if there is none (server_args.py)."""
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
        "max_total_tokens": max_running_requests * math.ceil((context_length + DRAFT_ROOM) / PAGE) * PAGE,
    }


def draft_room(speculation: Speculation) -> int:
    """Tokens of KV cache that a request's drafts take: those of a step, and of the next one (allocation_sizing.py)."""
    return 2 * max(speculation.num_speculative_tokens * speculation.topk, speculation.drafts + 1)


def serve(
    launch: Launch,
    drafter: Path | None,
    speculation: Speculation | None,
    wanted: Callable[[], bool] = lambda: True,
) -> ServerEndpoint:
    """Start a server, with the exported drafter in directory `drafter` if one is given, and check it.

    `wanted`: asked while it starts; False ends it.

    Raises:
        EngineDied: it ended before it was ready; the message has the end of its log.
        EagleError: it was not ready in time, or runs in another way than was asked.
    """
    if (drafter is None) != (speculation is None):
        raise EagleError("serve needs a drafter and its speculation settings, or neither")
    if speculation is not None and (room := draft_room(speculation)) > DRAFT_ROOM:
        raise EagleError(
            f"speculation needs {room} tokens of KV cache for the drafts of a request, and {DRAFT_ROOM} are kept for"
            " them: use fewer num_speculative_tokens, topk or num_draft_tokens"
        )
    endpoint = ServerEndpoint(
        Server.launch(
            lambda port: argv(launch, port, drafter, speculation),
            log=launch.log,
            env={**ENVIRONMENT, **launch.environment},
            timeout=launch.timeout,
            port=launch.port,
            highest_port=HIGHEST_PORT,
            wanted=wanted,
        ),
        GenerateDialect(launch.target, speculation, metrics=True),
        per_request_counters=speculation is not None,
        prefix_cache=False,
        sampling_refused=None if speculation is None else sampling_refused(launch.device),
    )
    try:
        info = json.loads(endpoint.get("/server_info"))
        if found := differences(launch, info, drafter, speculation):
            raise EagleError(
                f"SGLang {launch.interpreter.version} runs in another way than was asked (its log is {launch.log}):\n"
                + "\n".join(found)
            )
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def argv(launch: Launch, port: int, drafter: Path | None, speculation: Speculation | None) -> list[str]:
    """The command that starts the server at `port`."""
    own = {
        "host": LOOPBACK,
        "port": port,
        "enable_metrics": True,
        # The first token of an answer is sent at once, all others with the last one: to stream those between would cost
        # both sides time, and nothing reads when they came.
        "stream_interval": launch.arguments["context_length"],
    }
    speculative = speculative_arguments(drafter, speculation)
    # Of a server without a drafter, too.
    if taken := sorted(launch.arguments.keys() & (own.keys() | speculative.keys())):
        raise EagleError(f"backend.engine_args: {', '.join(taken)} cannot be set there; leave it out")
    command = [str(launch.interpreter.python), str(SCRIPT), "sglang.launch_server"]
    return [*command, *flags(own, None), *flags(launch.arguments, None), *flags(speculative, None)]


def speculative_arguments(drafter: Path | None, speculation: Speculation | None) -> dict[str, Any]:
    """All that says how SGLang speculates; None: it does not. What is left out would be its own choice, by class."""
    names = (
        "algorithm", "draft_model_path", "draft_model_quantization", "num_steps", "eagle_topk", "num_draft_tokens",
    )  # fmt: skip
    values: tuple[Any, ...] = (None,) * len(names)
    if drafter is not None and speculation is not None:
        k, topk, nodes = speculation.num_speculative_tokens, speculation.topk, speculation.drafts + 1
        # Else the drafter is quantized as the target is.
        values = (ALGORITHM, str(drafter), AS_IT_IS, k, topk, nodes)
    return {f"speculative_{name}": value for name, value in zip(names, values, strict=True)}


def sampling_refused(device: str) -> str | None:
    """Why a server that speculates on `device` cannot sample; None if it can."""
    if device == "cpu":
        return (
            "SGLang verifies greedily on a CPU, whatever temperature is asked for (speculative/eagle_utils.py); use"
            " temperature 0, or serve on a GPU"
        )
    return None


def differences(
    launch: Launch, info: Mapping[str, Any], drafter: Path | None, speculation: Speculation | None
) -> list[str]:
    """Where the server does not run as it was asked to; `info` is the JSON of its /server_info."""
    reported = read(info)
    asked = {
        **compared(Asked(launch.interpreter.version, launch.attention, launch.quantization, launch.arguments), info),
        "algorithm": (None if drafter is None else ALGORITHM, reported.algorithm),
        "drafter": (None if drafter is None else str(drafter), reported.drafter),
        "drafter's quantization": (None, reported.drafter_quantization),
        "speculation": (speculation, reported.speculation),
    }
    return [f"{name}: asked {value}, serves with {found}" for name, (value, found) in asked.items() if value != found]
