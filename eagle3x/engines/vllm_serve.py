"""Starting vLLM's OpenAI server, and making sure that it runs as it was asked to.

vLLM logs that it cannot do what was asked, and goes on with something else (an attention backend, the layers that a
drafter is fed). So what it says of itself is compared with what was asked, before it answers anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3x.capture import Reader, default_boundaries, predicted_boundaries
from eagle3x.engines import spec_metrics, vllm_log
from eagle3x.engines.flags import flags
from eagle3x.engines.openai_stream import OpenAIDialect
from eagle3x.engines.ports import LOOPBACK
from eagle3x.engines.server import SCRIPT, Server
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.engines.interpreter import EngineInterpreter
    from eagle3x.targets import Target

SERVED_NAME = "target"
CAPACITY = ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override")
"""What vLLM would choose by the memory that is left, of which a drafter takes some. `num_gpu_blocks_override` counts
blocks of `block_size` tokens, whatever a token's keys and values take, so it is the same capacity on both sides."""
METHOD = "eagle3"
ENVIRONMENT = {
    "VLLM_LOG_MODEL_INSPECTION": "1",  # `vllm_log` reads it
    "PYTHONSAFEPATH": "1",  # `-m` would look for packages in the working directory first
}
COUNTERS_PER_REQUEST = (0, 32)
"""First version that was seen to report what was accepted per request; 0.26 does not."""
SAMPLING_FAULT = (0, 32)
"""The version that loses each request's temperature when it speculates on a CPU (utils/cpu_triton_utils.py:390)."""


@dataclass(frozen=True)
class Launch:
    """A server to start.

    `arguments`: vLLM's engine arguments by name, alike with and without a drafter; each of `CAPACITY` must be there.
    `environment` is added to this process's. `attention` and `quantization` are what vLLM must report, in its own words
    ("CPU_ATTN"; None or "compressed-tensors"). `log` is appended to. `timeout`: seconds until it must be ready.

    Raises:
        ValueError: an argument of `CAPACITY` is missing.
    """

    interpreter: EngineInterpreter
    target: Target
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    device: Literal["cpu", "cuda"]
    runner: Literal["v1", "v2"]
    attention: str
    quantization: str | None
    log: Path
    timeout: float
    port: int | None = None

    def __post_init__(self) -> None:
        if missing := [name for name in CAPACITY if name not in self.arguments]:
            raise ValueError(f"arguments lack {', '.join(missing)}: both sides of a comparison need the same capacity")

    @property
    def release(self) -> tuple[int, int]:
        """The first two numbers of vLLM's version."""
        return release_of(self.interpreter.version)


def release_of(version: str) -> tuple[int, int]:
    """(0, 32) of "0.32.0+cpu"."""
    major, minor, *_ = re.findall(r"\d+", version)
    return int(major), int(minor)


def capacity(max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, block_size: int) -> dict[str, int]:
    """The arguments of `CAPACITY` with which every sequence fits at its full length, drafts included."""
    blocks = math.ceil(max_model_len / block_size) + 1  # drafts may need one more
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "num_gpu_blocks_override": max_num_seqs * blocks + 1,  # vLLM keeps one to itself
    }


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
    logged_before = launch.log.stat().st_size if launch.log.exists() else 0
    endpoint = ServerEndpoint(
        Server.launch(
            lambda port: argv(launch, port, drafter, speculation),
            log=launch.log,
            env={**ENVIRONMENT, **launch.environment},
            timeout=launch.timeout,
            port=launch.port,
            wanted=wanted,
        ),
        OpenAIDialect(SERVED_NAME, launch.target.eos_token_ids),
        per_request_counters=speculation is not None and launch.release >= COUNTERS_PER_REQUEST,
        prefix_cache=False,
        sampling_refused=None if speculation is None else sampling_refused(launch.interpreter.version, launch.device),
    )
    try:
        with launch.log.open("rb") as file:
            file.seek(logged_before)
            logged = vllm_log.read(file.read().decode(errors="replace"))
        found = [
            *capacity_differences(launch, spec_metrics.cache_config(endpoint.get("/metrics"))),
            *differences(launch, logged, drafter, speculation),
        ]
        if found:
            raise EagleError(
                f"vLLM {logged.version} runs in another way than was asked (its log is {launch.log}):\n"
                + "\n".join(found)
            )
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def argv(launch: Launch, port: int, drafter: Path | None, speculation: Speculation | None) -> list[str]:
    """The command that starts the server at `port`."""
    command = [str(launch.interpreter.python), str(SCRIPT), "vllm.entrypoints.openai.api_server"]
    own: dict[str, Any] = {
        "host": LOOPBACK,
        "port": port,
        "served_model_name": SERVED_NAME,
        "enable_prompt_tokens_details": True,
        # The first token of an answer is sent at once, all others with the last one: to stream those between would cost
        # both sides time, and nothing reads when they came.
        "stream_interval": launch.arguments["max_model_len"],
        "disable_uvicorn_access_log": True,
    }
    if drafter is not None and speculation is not None:
        own["speculative_config"] = {
            "method": METHOD,
            "model": str(drafter),
            "num_speculative_tokens": speculation.num_speculative_tokens,
        }
        if launch.release >= COUNTERS_PER_REQUEST:
            own["per_request_spec_decode_metrics"] = "summary"
    if taken := sorted(own.keys() & launch.arguments.keys()):
        raise EagleError(f"backend.engine_args: {', '.join(taken)} cannot be set there; leave it out")
    return [*command, *flags(own, "--no-"), *flags(launch.arguments, "--no-")]


def sampling_refused(version: str, device: str) -> str | None:
    """Why this version cannot speculate on `device` at a temperature above 0; None if it can."""
    if device == "cpu" and release_of(version) == SAMPLING_FAULT:
        return (
            f"vLLM {version} loses the temperature of requests when it speculates on a CPU, and"
            " samples from noise; use temperature 0, or serve on a GPU"
        )
    return None


def capacity_differences(launch: Launch, cache: Mapping[str, str]) -> list[str]:
    """Where the key-value cache is not the one that was asked for; `cache` is vLLM's CacheConfig as it reports it."""
    asked = {
        "num_gpu_blocks": launch.arguments["num_gpu_blocks_override"],
        "block_size": launch.arguments["block_size"],
        "enable_prefix_caching": False,
    }
    return [
        f"{name}: asked {value}, serves with {cache.get(name)}"
        for name, value in asked.items()
        if cache.get(name) != str(value)
    ]


def differences(
    launch: Launch, logged: vllm_log.Logged, drafter: Path | None, speculation: Speculation | None
) -> list[str]:
    """Where the server does not run as it was asked to."""
    asked: dict[str, tuple[Any, Any]] = {
        "version": (launch.interpreter.version, logged.version),
        "backend.runner": (launch.runner, logged.runner),
        "dtype": (launch.arguments["dtype"], logged.dtype),
        "quantization": (launch.quantization, logged.quantization),
        "attention": ([launch.attention], sorted(logged.attention)),
        "tensor_parallel_size": (launch.arguments.get("tensor_parallel_size", 1), logged.tensor_parallel),
        "kv_cache_dtype": (launch.arguments.get("kv_cache_dtype", "auto"), logged.kv_cache_dtype),
        "speculation (method, num_speculative_tokens)": (
            None if speculation is None else (METHOD, speculation.num_speculative_tokens),
            logged.speculation,
        ),
    }
    if drafter is not None:
        blocks = launch.target.num_blocks
        config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
        reader = Reader("vllm", launch.interpreter.version, runner=launch.runner)
        fed = logged.aux_layers or default_boundaries(blocks)
        asked["boundaries fed to the drafter"] = (predicted_boundaries(reader, config, blocks), fed)
    return [
        f"{name}: asked {wanted}, serves with {found}" for name, (wanted, found) in asked.items() if wanted != found
    ]
