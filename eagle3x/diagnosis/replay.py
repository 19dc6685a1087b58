"""Exact replay of greedy chain speculation over text that is known.

At temperature 0 the text is the target's greedy path: a draft is accepted if it equals the text, and until the first
rejection the drafted tokens are the text. So one training-time-test forward gives every draft that could be made, and
the walk picks the verify steps that an engine takes:

    token_ids   p p p p | r r r r r s | c c c c        P prompt, R response with its stop s, continuation
    position    0       P           P+R-1
                        ^ anchor of the first verify step: the token that the prefill yields

A verify step with anchor a (the last token that is known) reads the row a-1 of the drafter, whose TTT step j drafts
token a+1+j. If m drafts equal the text, the next anchor is a+m+1. Steps are taken until R tokens are out; drafts that
are accepted past the stop count, as they do on the engines.

Shapes: T tokens of one sample, A boundaries, H hidden size, N rows that a verify step may start from, K drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3x.kernels.layout import layout_of
from eagle3x.types import EagleError, SpecCounters

if TYPE_CHECKING:
    from eagle3x.drafters.eagle3 import Eagle3

TOKENS_PER_FORWARD = 4096
HEAD_CHUNK = 512
"""Rows that meet the draft head together."""


@dataclass(frozen=True)
class ReplaySample:
    """Greedy text with the states that the drafter is fed. token_ids: [T]. aux: [T, A*H]."""

    id: str
    token_ids: Tensor
    aux: Tensor
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class VerifyStep:
    """One verify step: the position of its anchor, how many drafts were accepted, and how near it was to another end.

    gap: smallest difference between the two largest draft logits, over the accepted drafts and the first rejected one.
    """

    anchor: int
    accepted: int
    gap: float


@dataclass(frozen=True)
class Rows:
    """What would be accepted from each row that a verify step may start from: accepted [N], gaps [N, K]."""

    first_anchor: int
    accepted: list[int]
    gaps: list[list[float]]

    def steps(self, num_speculative_tokens: int) -> tuple[VerifyStep, ...]:
        """The verify steps of a chain of so many drafts, at most K."""
        k = num_speculative_tokens
        accepted = [min(a, k) for a in self.accepted]
        return tuple(
            VerifyStep(self.first_anchor + i, accepted[i], min(self.gaps[i][: min(accepted[i] + 1, k)]))
            for i in walk(accepted)
        )


def replay(drafter: Eagle3, samples: Iterable[ReplaySample], num_speculative_tokens: int) -> list[SpecCounters]:
    """The counters of each sample, as an engine that is fed the sample's states would count them.

    Raises EagleError where the text ends before the last draft that an engine may verify.
    """
    return [
        counters(steps, num_speculative_tokens) for steps in replay_detailed(drafter, samples, num_speculative_tokens)
    ]


def replay_lengths(drafter: Eagle3, samples: Iterable[ReplaySample], longest: int) -> dict[int, list[SpecCounters]]:
    """`replay` with chains of 1 to `longest` drafts, by their number, from one forward.

    What a draft is depends on nothing behind it, so a shorter chain drafts the same; but its steps start elsewhere.
    """
    rows = list(_replay(drafter, samples, longest))
    return {k: [counters(r.steps(k), k) for r in rows] for k in range(1, longest + 1)}


def replay_detailed(
    drafter: Eagle3, samples: Iterable[ReplaySample], num_speculative_tokens: int
) -> list[tuple[VerifyStep, ...]]:
    """As `replay`, with every verify step of each sample."""
    return [r.steps(num_speculative_tokens) for r in _replay(drafter, samples, num_speculative_tokens)]


def counters(steps: Sequence[VerifyStep], num_speculative_tokens: int) -> SpecCounters:
    """What an engine counts over these steps: A_i is the number of steps that accepted at least i drafts."""
    accepted_at = tuple(sum(s.accepted >= i for s in steps) for i in range(1, num_speculative_tokens + 1))
    return SpecCounters(len(steps), len(steps) * num_speculative_tokens, accepted_at)


def walk(accepted: Sequence[int]) -> list[int]:
    """Indices of the rows that verify steps start from; `accepted[i]` drafts are right if one starts at row i.

    Row i has the anchor P + i, so there are R - 1 rows: the prefill yields the first token of R.
    """
    visited = []
    row = 0
    while row < len(accepted):
        visited.append(row)
        row += accepted[row] + 1
    return visited


def _replay(drafter: Eagle3, samples: Iterable[ReplaySample], k: int) -> Iterator[Rows]:
    if k < 1:
        raise ValueError(f"at least one token must be drafted, not {k}")
    batch: list[ReplaySample] = []
    for sample in samples:
        _require_text(sample, k)
        if batch and sum(map(_rows_needed, batch)) + _rows_needed(sample) > TOKENS_PER_FORWARD:
            yield from _replay_batch(drafter, batch, k)
            batch = []
        batch.append(sample)
    if batch:
        yield from _replay_batch(drafter, batch, k)


def _require_text(sample: ReplaySample, k: int) -> None:
    """The last anchor is P+R-2, and its drafts reach k tokens further."""
    if sample.prompt_tokens < 1:
        raise EagleError(f"{sample.id}: replay needs at least one prompt token")
    if len(sample.aux) != len(sample.token_ids):
        raise EagleError(f"{sample.id}: {len(sample.token_ids)} tokens but states of {len(sample.aux)}")
    needed = sample.prompt_tokens + sample.response_tokens + k - 1
    if sample.response_tokens > 1 and len(sample.token_ids) < needed:
        raise EagleError(
            f"{sample.id}: {len(sample.token_ids)} tokens, but replay of {k} drafts needs {needed}: the text must go on"
            f" {k - 1} tokens past the stop (sampling.continuation_tokens)"
        )


def _rows_needed(sample: ReplaySample) -> int:
    """Rows up to the last one that a verify step may start from (position P+R-3)."""
    return sample.prompt_tokens + max(sample.response_tokens - 2, 0)


@torch.no_grad()
def _replay_batch(drafter: Eagle3, batch: Sequence[ReplaySample], k: int) -> Iterator[Rows]:
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    # Documents keep k tokens past their last row: TTT step j of row i reads token i+1+j.
    lengths = [min(_rows_needed(s) + k, len(s.token_ids)) for s in batch]
    tokens = torch.cat([s.token_ids[:n] for s, n in zip(batch, lengths, strict=True)]).to(device)
    aux = torch.cat([s.aux[:n] for s, n in zip(batch, lengths, strict=True)]).to(device, dtype)
    counts = [max(s.response_tokens - 1, 0) for s in batch]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
    first_rows = [start + s.prompt_tokens - 1 for start, s in zip(starts, batch, strict=True)]
    rows = torch.cat([torch.arange(f, f + n) for f, n in zip(first_rows, counts, strict=True)])
    if len(rows) == 0:
        yield from (Rows(s.prompt_tokens, [], []) for s in batch)
        return
    states = drafter.ttt(aux, tokens, layout_of(rows, lengths).map(lambda x: x.to(device)), k)
    # Row i of sample s drafts s.token_ids[P+1+i ..]; the last of these lie past the tokens that the forward read.
    texts = [
        s.token_ids[s.prompt_tokens + 1 : s.prompt_tokens + n + k].unfold(0, k, 1)
        for s, n in zip(batch, counts, strict=True)
        if n
    ]
    right, gaps = _judged(drafter, states, torch.cat(texts).to(device))
    accepted_N = right.sum(1).tolist()
    gaps_NK = gaps.tolist()
    offset = 0
    for sample, n in zip(batch, counts, strict=True):
        yield Rows(sample.prompt_tokens, accepted_N[offset : offset + n], gaps_NK[offset : offset + n])
        offset += n


def _judged(drafter: Eagle3, states: Tensor, texts_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Whether draft and all before it equal the text, and its top-2 gap, both [N, K]. states: [K, N, H].

    Rows whose draft was wrong meet the head no more: no engine keeps what they draft next. Their gaps are 0.
    """
    right = torch.zeros_like(texts_NK, dtype=torch.bool)
    gaps = torch.zeros(texts_NK.shape, device=texts_NK.device)
    rows = torch.arange(len(texts_NK), device=texts_NK.device)
    for step, state in enumerate(states):
        tokens, gaps[rows, step] = _greedy(drafter, state[rows])
        same = tokens == texts_NK[rows, step]
        right[rows, step] = same
        rows = rows[same]
        if len(rows) == 0:
            break
    return right, gaps


def _greedy(drafter: Eagle3, state: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H] -> the drafted tokens (target ids) [N], and the gaps between their two largest logits [N]."""
    tokens, gaps = [], []
    for chunk in state.split(HEAD_CHUNK):
        top, ids = drafter.unit_logits(chunk).float().topk(2, dim=-1)
        tokens.append(drafter.to_target_ids(ids[:, 0]))
        gaps.append(top[:, 0] - top[:, 1])
    return torch.cat(tokens), torch.cat(gaps)
