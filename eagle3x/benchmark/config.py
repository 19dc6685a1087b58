"""Config of speculation and of the benchmark."""

from __future__ import annotations

from typing import Annotated

from eagle3x.identity import Added
from eagle3x.schema import config


@config
class Speculation:
    """What is drafted for a verify step: a chain of k drafts, or a tree whose longest path has k."""

    num_speculative_tokens: int
    """k. A chain of k drafts is SGLang's speculative_num_steps=k, speculative_num_draft_tokens=k+1."""
    topk: int
    """Branches of each node of a tree; 1: a chain."""
    num_draft_tokens: int | None
    """Nodes of a tree that are verified, with its root: SGLang's name. null for a chain, whose k decides it."""

    def __post_init__(self) -> None:
        k, width, nodes = self.num_speculative_tokens, self.topk, self.num_draft_tokens
        if k < 1:
            raise ValueError("num_speculative_tokens must be at least 1")
        if width < 1:
            raise ValueError("topk must be at least 1")
        if width == 1 and nodes is not None:
            raise ValueError(f"num_draft_tokens={nodes}: a chain (topk=1) has k+1={k + 1}; use null")
        if width > 1:
            # SGLang drafts `topk` nodes in the first step, `topk` for each of the `topk` that it keeps in every other.
            drafted = width + (k - 1) * width**2
            if nodes is None or not k < nodes <= drafted + 1:
                raise ValueError(
                    f"num_draft_tokens={nodes}: a tree of {k} steps with topk={width} has {k + 1} to {drafted + 1}"
                )

    @staticmethod
    def chain(num_speculative_tokens: int) -> Speculation:
        """A chain of so many drafts."""
        return Speculation(num_speculative_tokens=num_speculative_tokens, topk=1, num_draft_tokens=None)

    @property
    def is_tree(self) -> bool:
        """Whether a verify step looks at several paths."""
        return self.topk > 1

    @property
    def drafts(self) -> int:
        """Draft tokens that one verify step looks at: D = V * drafts."""
        return self.num_speculative_tokens if self.num_draft_tokens is None else self.num_draft_tokens - 1


@config
class Benchmark:
    """The acceptance passes (counters) and the timing pass (T=0, with and without the drafter, ABBA)."""

    max_prompts: int | None
    """Eval prompts of the acceptance pass; null: all."""
    acceptance_concurrency: int
    """1 where the engine only has totals; an engine with per-request counters may run more at a time."""
    temperatures: Annotated[tuple[float, ...], Added((0.0,))]
    """Of the acceptance passes, ascending. The one at 0 is always made: replay, the serve probe and the comparison of
    outputs read it."""
    top_p: Annotated[float, Added(1.0)]
    """At temperatures above 0."""
    timing: bool
    timing_prompts: int
    timing_tokens: int
    """Output tokens per request of the timing pass, whatever the model says (ignore_eos)."""
    timing_concurrency: tuple[int, ...]
    timing_rounds: int
    """ABBA rounds: each runs baseline, drafter, drafter, baseline."""
    warmup_requests: int
    resamples: int
    confidence: float
    near_tie: float | None
    """Top-2 logit gap below which two greedy outputs may part; null: by the dtype that is served (cell.NEAR_TIE)."""

    @property
    def above_zero(self) -> tuple[float, ...]:
        """The temperatures of the acceptance passes that sample."""
        return self.temperatures[1:]

    def __post_init__(self) -> None:
        if self.temperatures[:1] != (0.0,) or list(self.temperatures) != sorted(set(self.temperatures)):
            raise ValueError(f"temperatures must be 0 and then ascending ones, not {list(self.temperatures)}")
        if not 0 < self.top_p <= 1:
            raise ValueError("top_p must be in (0, 1]")
        if not 0.5 < self.confidence < 1:
            raise ValueError("confidence must be in (0.5, 1)")
        if self.resamples < 100:
            raise ValueError("resamples must be at least 100")
        if self.timing_prompts < max(2, *self.timing_concurrency):
            raise ValueError("timing_prompts must be at least 2, and at least each timing_concurrency")
        if min(self.timing_concurrency, default=0) < 1 or self.acceptance_concurrency < 1:
            raise ValueError("concurrencies must be at least 1, and timing_concurrency not empty")
