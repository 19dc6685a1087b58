"""Config of speculation and of the benchmark."""

from __future__ import annotations

from eagle3x.schema import config


@config
class Speculation:
    """A chain of `num_speculative_tokens` (k) drafts per verify step. SGLang's num_draft_tokens is k + 1."""

    num_speculative_tokens: int

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError("num_speculative_tokens must be at least 1")


@config
class Benchmark:
    """The acceptance pass (counters, T=0) and the timing pass (with and without the drafter, ABBA)."""

    max_prompts: int | None
    """Eval prompts of the acceptance pass; null: all."""
    acceptance_concurrency: int
    """1 where the engine only has totals; an engine with per-request counters may run more at a time."""
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

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1:
            raise ValueError("confidence must be in (0.5, 1)")
        if self.resamples < 100:
            raise ValueError("resamples must be at least 100")
        if self.timing_prompts < max(2, *self.timing_concurrency):
            raise ValueError("timing_prompts must be at least 2, and at least each timing_concurrency")
        if min(self.timing_concurrency, default=0) < 1 or self.acceptance_concurrency < 1:
            raise ValueError("concurrencies must be at least 1, and timing_concurrency not empty")
