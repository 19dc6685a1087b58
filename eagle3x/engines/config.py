"""Config of the three engine slots: who extracts the states (root), who writes the text, who serves."""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from eagle3x.identity import PLACEMENT
from eagle3x.schema import config

EngineName = Literal["transformers", "vllm", "sglang"]


@config
class Backend:
    """An engine and how it is started."""

    name: EngineName
    runner: Literal["auto", "v1", "v2"]
    """vLLM's model runner; auto: v1. No other engine has a choice."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    kv_cache_dtype: str
    tensor_parallel: int
    batch_size: int
    """Sequences that are generated or captured together."""
    engine_args: dict[str, Any]
    """Passed to the engine as they are."""
    python: Annotated[str | None, PLACEMENT]
    """Interpreter that has the engine; null: `.venv-<engine>`, else this one."""
    url: Annotated[str | None, PLACEMENT]
    """Attach to a server that already runs (serve slot only)."""
    port: Annotated[int | None, PLACEMENT]
    memory_fraction: Annotated[float, PLACEMENT]
    start_timeout: Annotated[float, PLACEMENT]
    """Seconds that a server may take to get ready."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.batch_size < 1:
            raise ValueError("tensor_parallel and batch_size must be at least 1")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must be in (0, 1], not {self.memory_fraction}")


@config
class Quantization:
    """How the target's weights are stored in this slot: as its checkpoint is, or as they are rounded for this slot.

    `fp8_online`: by the engine, while it loads an unquantized checkpoint.
    """

    scheme: Literal["none", "fp8", "int8", "int4", "nvfp4", "fp8_online"]


@config
class Attention:
    """The attention kernels of this slot; `auto` is the engine's own choice, recorded as resolved."""

    name: str


@config
class GenerateSlot:
    """Who writes the responses."""

    backend: Backend
    quantization: Quantization
    attention: Attention


@config
class ServeSlot:
    """Who serves the target with the exported drafter, and what its exported config says about layers.

    `capture`: `trained` writes for each engine the ids that feed the boundaries the drafter was trained on; `as_is`
    and `plus_one` write `aux_layer_ids` (default: the target's) raw, or plus one, into both keys, as people do by hand;
    `published` leaves a pretrained drafter's keys as they are.
    """

    backend: Backend
    quantization: Quantization
    attention: Attention
    capture: Literal["trained", "as_is", "plus_one", "published"]
    aux_layer_ids: tuple[int, ...] | None

    def __post_init__(self) -> None:
        if self.aux_layer_ids is not None and self.capture in ("trained", "published"):
            raise ValueError(f"aux_layer_ids needs capture=as_is or plus_one: `{self.capture}` has ids of its own")


@plain_dataclass(frozen=True)
class Slot:
    """One of the three slots, as an adapter sees it."""

    role: Literal["extract", "generate", "serve"]
    backend: Backend
    quantization: Quantization
    attention: Attention


LOGS = "logs"
"""Folder of a stage's working directory for what the engines' processes print; it stays with the artifact."""


@plain_dataclass(frozen=True)
class Job:
    """What an engine is opened for. `longest`: tokens of its longest sequence, prompt and output together; `logs`: a
    folder for the logs of the processes that it starts."""

    longest: int
    logs: Path
