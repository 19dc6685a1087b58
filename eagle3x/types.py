"""Frozen records that cross the borders between stages and engines. No torch at import time.

Shapes: T tokens of one sample, A boundaries captured, H hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["train", "val", "eval"]
"""`train` teaches the drafter, `val` chooses its checkpoint, `eval` is seen by the benchmark alone."""

Finish = Literal["stop", "length", "given"]
LastNorm = Literal["pre_norm", "post_norm"]


class EagleError(Exception):
    """A failure whose message is meant for the user: what is wrong, where, and what would be right."""


class ConfigError(EagleError):
    """Bad input, found before any work started (exit code 2)."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Prompt:
    """A conversation that the target is to answer; one that ends with an assistant turn can be taken as given.

    `follow_ups`: what the user asks after the target's own answers, one after the other.
    """

    id: str
    category: str
    split: Split
    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Response:
    """A tokenized conversation.

    `token_ids` = prompt (`prompt_tokens`), then the response with its stop token (`response_tokens`), then the
    continuation past the stop: engines count drafts that are accepted there, so replay needs that text.
    `loss_mask[i]` says that token i was written by the target (a label), never true in prompt or continuation.
    `cut_tokens`: tokens that were dropped because the sample was longer than the limit.
    """

    id: str
    category: str
    split: Split
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    prompt_tokens: int
    response_tokens: int
    finish: Finish
    cut_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.loss_mask) != len(self.token_ids):
            raise ValueError(f"{self.id}: {len(self.token_ids)} tokens but {len(self.loss_mask)} mask entries")
        if self.prompt_tokens + self.response_tokens > len(self.token_ids):
            raise ValueError(f"{self.id}: prompt and response are longer than the sample")


@dataclass(frozen=True)
class TokenSample:
    """What `Engine.capture` reads: the tokens of one sample."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class HiddenStates:
    """The states of one sample, on the CPU.

    aux: [T, A*H], the residual stream at the asked boundaries, concatenated in ascending order.
    last: [T, H], the last hidden state; `last_norm` says on which side of the final norm.
    norms: [T, A+1] float32, the length of each of them, where the engine worked it out: not finite if a state is not.
    """

    id: str
    token_ids: tuple[int, ...]
    aux: Tensor
    last: Tensor
    last_norm: LastNorm
    norms: Tensor | None = None


@dataclass(frozen=True)
class Request:
    """One generation: at most `max_tokens` tokens after `prompt_ids`. Temperature 0 is greedy.

    `top2_gaps`: whether the answer should say how near each token's runner-up was. That may cost time.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    top2_gaps: bool = False


@dataclass(frozen=True)
class SpecCounters:
    """Counters of speculative decoding: `verify_steps` V, `drafted` D, `accepted_at` A_1..A_k.

    A_i is the number of verify steps in which the draft at position i (and all before it) was accepted.
    """

    verify_steps: int
    drafted: int
    accepted_at: tuple[int, ...]

    def __post_init__(self) -> None:
        chain = (self.verify_steps, *self.accepted_at)
        if any(b > a for a, b in pairwise(chain)) or min(chain) < 0:
            raise ValueError(f"acceptance by position must fall from the verify steps: {chain}")

    @property
    def accepted(self) -> int:
        """Accepted drafts A, over all positions."""
        return sum(self.accepted_at)

    def __add__(self, other: SpecCounters) -> SpecCounters:
        if len(self.accepted_at) != len(other.accepted_at):
            raise ValueError("counters of different numbers of speculative tokens cannot be added")
        positions = tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True))
        return SpecCounters(self.verify_steps + other.verify_steps, self.drafted + other.drafted, positions)

    def __sub__(self, other: SpecCounters) -> SpecCounters:
        positions = tuple(a - b for a, b in zip(self.accepted_at, other.accepted_at, strict=True))
        return SpecCounters(self.verify_steps - other.verify_steps, self.drafted - other.drafted, positions)

    @staticmethod
    def zero(num_speculative_tokens: int) -> SpecCounters:
        """Counters of an engine that has not speculated yet."""
        return SpecCounters(0, 0, (0,) * num_speculative_tokens)


@dataclass(frozen=True)
class Timing:
    """Seconds on one monotonic clock: request sent, first token seen, last token seen."""

    start: float
    first_token: float
    end: float


@dataclass(frozen=True)
class Completion:
    """What an engine made of a request.

    `token_ids`: the output, up to and including the stop token. `counters`: None without a drafter, or where the
    engine has no per-request figures. `top2_gaps`: per output token the target's top-2 logit gap, where known.
    `cached_tokens`: prompt tokens served from a prefix cache (None: the engine does not say).
    """

    id: str
    token_ids: tuple[int, ...]
    finish: Finish
    timing: Timing
    counters: SpecCounters | None = None
    cached_tokens: int | None = None
    top2_gaps: tuple[float, ...] | None = None


def total(counters: Sequence[SpecCounters]) -> SpecCounters:
    """Sum of at least one counter."""
    first, *rest = counters
    for other in rest:
        first = first + other
    return first
