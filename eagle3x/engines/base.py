"""The seam between eagle3x and an inference engine. Everything that differs between engines is behind it.

An `Adapter` answers without loading anything (it is asked before any work starts); `Adapter.open` loads the target and
returns an `Engine`; `Engine.serve` returns an `Endpoint`, which the one benchmark runner drives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from eagle3x.types import Completion, HiddenStates, Request, SpecCounters, TokenSample

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.config import Hardware
    from eagle3x.engines.config import Job, Slot
    from eagle3x.targets import Target


@dataclass(frozen=True)
class DrafterPlan:
    """What is known of a drafter before it is trained or loaded.

    num_aux: boundaries that its fc reads. boundaries: those it is to be fed, None if that is not known yet.
    variants: the norm options that it uses. sampled: whether it is to serve at temperatures above 0, too.
    """

    num_aux: int
    boundaries: tuple[int, ...] | None
    variants: frozenset[str]
    speculation: Speculation
    sampled: bool


def chains_only(engine: str, speculation: Speculation) -> list[str]:
    """Why an engine that drafts chains alone refuses `speculation`; empty if it does not."""
    if not speculation.is_tree:
        return []
    return [f"speculation.topk={speculation.topk}: {engine} drafts chains only; use speculation=chain"]


class Endpoint(Protocol):
    """A target that answers requests, with or without a drafter."""

    counts_past_stop: bool
    """Whether drafts accepted past the stop are counted (they are on every engine that we know; pinned by tests)."""

    per_request_counters: bool
    """Whether `Completion.counters` is filled. If not, figures come from differences of `totals`."""

    def complete(self, requests: Sequence[Request], concurrency: int) -> Iterator[Completion]:
        """Answer all requests, at most `concurrency` at a time, in order of completion."""
        ...

    def totals(self) -> SpecCounters | None:
        """The engine's counters since it started, once they are stable; None without a drafter."""
        ...

    def flush_prefix_cache(self) -> None:
        """Forget cached prefixes, so that a repeated prompt costs what a new one costs."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Engine(Protocol):
    """A loaded target model; a context manager that frees it."""

    can_serve_both: bool
    """Whether the machine holds two endpoints at once, with and without a drafter."""

    can_serve_plain: bool
    """Whether the target can also be served without a drafter; a server that is not ours serves as it was started."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answer the requests at the engine's best batch size, in order of completion."""
        ...

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """States of each sample at ascending `boundaries`, and its last hidden state."""
        ...

    def serve(self, drafter: Path | None, speculation: Speculation | None) -> Endpoint:
        """Serve the target, speculating with the exported drafter in directory `drafter` if one is given.

        The drafter's config alone decides which boundaries it is fed, as on the user's server.
        """
        ...

    def native_layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """The ids that make this engine capture exactly `boundaries`; refuses what no id expresses."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Adapter(Protocol):
    """What is known of an engine before it is loaded. Cheap: no torch, no engine import in this process."""

    name: str

    def identity(self, slot: Slot, target: Target, hardware: Hardware) -> dict[str, Any]:
        """Name, version, runner, resolved attention backend, quantization, dtypes, parallelism: what is hashed."""
        ...

    def refusals(self, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
        """Every reason why this combination cannot run here, each with what would be right. Empty: go on."""
        ...

    def drafter_refusals(self, slot: Slot, target: Target, hardware: Hardware, plan: DrafterPlan) -> list[str]:
        """Every reason why this engine would not serve such a drafter, or would serve it wrong."""
        ...

    def open(self, slot: Slot, target: Target, hardware: Hardware, job: Job) -> Engine:
        """Load the target."""
        ...
