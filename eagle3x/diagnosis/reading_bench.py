"""How good a reading of a drafter is: quickly, by what the drafter expects, and in full, by replay.

Shapes: R rows looked at, K TTT steps, D draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3x.benchmark.statistics import Bootstrap, Interval, compare_tau, tau_interval
from eagle3x.diagnosis.captured_text import CapturedText
from eagle3x.diagnosis.hypotheses import Reading
from eagle3x.diagnosis.replay import ReplaySample, replay
from eagle3x.drafters.checkpoint import module
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.kernels.layout import layout_of
from eagle3x.targets import Target
from eagle3x.types import SpecCounters

QUICK_TOKENS, QUICK_ROWS, QUICK_STEPS = 4096, 512, 2
"""What the quick figure looks at: so much text, rows spread evenly over it, and the first drafts of each row."""
RESAMPLES = 12_000
"""At least so many resamples: p-values of a hundred hypotheses must be small enough to be adjusted."""


@dataclass(frozen=True)
class Gain:
    """A paired difference of two readings' tau, and its two-sided p-value."""

    difference: Interval
    p_value: float


class Bench:
    """Replays readings on the same texts, `k` drafts a step. Their last hidden states must be after the final norm."""

    def __init__(self, target: Target, texts: Sequence[CapturedText], k: int, bootstrap: Bootstrap) -> None:
        self.target, self.texts, self.k = target, texts, k
        self.ids = [text.text.id for text in texts]
        self.bootstrap = replace(bootstrap, resamples=max(bootstrap.resamples, RESAMPLES))
        tokens = sum(len(text.text.token_ids) for text in texts)
        fitting = max(1, len(texts) * QUICK_TOKENS // tokens)
        self.quick_texts = [texts[i] for i in _spread(len(texts), fitting)]

    def expected(self, reading: Reading) -> float:
        """Log of the drafts that would be accepted of the first two, were they drawn from the drafter's distribution.

        The mean over rows of p_1 + p_1 p_2, p_j the probability of the text's own token at step j. It moves where tau,
        which counts whole drafts, does not yet: with two faults at once, each repair alone shows here.
        """
        steps = min(self.k, QUICK_STEPS)
        drafter, samples = module(reading.published, self.target), reading.samples(self.quick_texts)
        log_p = _log_probabilities(drafter, samples, steps).cumsum(0)  # [K, R]
        return float(log_p.flatten().logsumexp(0)) - math.log(log_p.shape[1])

    def counters(self, reading: Reading) -> list[SpecCounters]:
        """Of each text, by replay."""
        return replay(module(reading.published, self.target), reading.samples(self.texts), self.k)

    def tau(self, counters: Sequence[SpecCounters]) -> Interval:
        """tau with its interval."""
        return tau_interval(counters, self.ids, self.bootstrap)

    def gain(self, a: Sequence[SpecCounters], b: Sequence[SpecCounters]) -> Gain:
        """tau(a) - tau(b).

        Its p-value is at least what the exact sign test over the n texts that differ can give, 2^(1-n): a bootstrap of
        few texts that all moved one way would call that certain.
        """
        compared = compare_tau(a, b, self.ids, self.bootstrap)
        differing = sum((x.verify_steps, x.accepted) != (y.verify_steps, y.accepted) for x, y in zip(a, b, strict=True))
        return Gain(compared.difference, max(compared.p_value, min(1.0, 2.0 ** (1 - differing))))


@torch.no_grad()
def _log_probabilities(drafter: Eagle3, samples: Sequence[ReplaySample], steps: int) -> Tensor:
    """[K, R]: of the text's token at each step, for rows spread evenly over all that a verify step may start from."""
    lengths = [s.prompt_tokens + s.response_tokens + steps - 1 for s in samples]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    rows = torch.cat(
        [start + torch.arange(s.prompt_tokens - 1, s.prompt_tokens + s.response_tokens - 2)
         for start, s in zip(starts, samples, strict=False)]
    )  # fmt: skip
    rows = rows[_spread(len(rows), QUICK_ROWS)]
    tokens = torch.cat([s.token_ids[:n] for s, n in zip(samples, lengths, strict=True)])
    aux = torch.cat([s.aux[:n] for s, n in zip(samples, lengths, strict=True)]).to(drafter.fc.weight.dtype)
    draft_ids = torch.full((drafter.arch.vocab_size,), -1)
    draft_ids[drafter.target_ids()] = torch.arange(drafter.arch.draft_vocab_size)
    states = drafter.ttt(aux, tokens, layout_of(rows, lengths), steps)
    found = []
    for step, state in enumerate(states):
        wanted = draft_ids[tokens[rows + 2 + step]]
        log_p = drafter.unit_logits(state).log_softmax(-1)
        picked = log_p.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        found.append(torch.where(wanted < 0, -torch.inf, picked))
    return torch.stack(found)


def _spread(n: int, wanted: int) -> list[int]:
    """At most `wanted` indices below n, evenly apart."""
    return torch.linspace(0, n - 1, min(n, wanted)).long().tolist()
