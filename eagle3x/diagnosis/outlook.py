"""What else a diagnosis says of a drafter: its gap between train and held-out text, and what it would be worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.benchmark.bootstrap import Bootstrap, Interval
from eagle3x.benchmark.gaps import gap_tau
from eagle3x.benchmark.statistics import Comparison, tau_interval
from eagle3x.data.shards import Sample, Shards
from eagle3x.diagnosis.captured_text import CapturedText
from eagle3x.diagnosis.estimate import Estimate, StepCosts, estimate, measured_cost
from eagle3x.diagnosis.replay import ReplaySample, replay, replay_lengths
from eagle3x.types import SpecCounters

if TYPE_CHECKING:
    from eagle3x.drafters.eagle3 import Eagle3

MOST_TRAIN_SAMPLES = 64
LEAST_RESPONSE = 8
"""Response tokens of a sample that is replayed: of fewer there are hardly any verify steps."""


def train_gap(drafter: Eagle3, states: Path, k: int, bootstrap: Bootstrap) -> Comparison | None:
    """tau on held-out (val) text - tau on train text, from the states that the drafter was trained on.

    states: a hidden_states artifact. The groups are independent. None with fewer than two samples on a side.
    """
    sides = []
    for split, most in (("val", None), ("train", MOST_TRAIN_SAMPLES)):
        samples = [s for s in (_shortened(sample, k) for sample in list(Shards(states / split))[:most]) if s]
        sides.append((replay(drafter, samples, k), [s.id for s in samples]))
    (val, val_ids), (train, train_ids) = sides
    if min(len(val_ids), len(train_ids)) < 2:
        return None
    return gap_tau(val, val_ids, train, train_ids, bootstrap)


def _shortened(sample: Sample, k: int) -> ReplaySample | None:
    """The sample as if its response ended k - 1 tokens earlier: replay reads that far past a response's end."""
    written = min(sample.response_tokens, len(sample.token_ids) - sample.prompt_tokens - (k - 1))
    if sample.prompt_tokens < 1 or written < LEAST_RESPONSE:
        return None
    return ReplaySample(sample.id, sample.token_ids, sample.aux, sample.prompt_tokens, written)


def worth(
    drafter: Eagle3,
    texts: Sequence[CapturedText],
    boundaries: tuple[int, ...],
    k: int,
    speedup: Mapping[str, Any],
    bootstrap: Bootstrap,
) -> Estimate | None:
    """The speed-up of chains of 1 to k drafts, from replay of `texts` and the step costs of a timing pass.

    speedup: a cell's, by concurrency. None if no leg of it has counters.
    """
    costs = [
        StepCosts(int(batch), ((k, measured_cost(timed["tau"], Interval(**timed["decode"]))),), "its timing pass")
        for batch, timed in speedup.items()
        if timed["tau"] is not None
    ]
    if not costs:
        return None
    lengths: dict[int, list[SpecCounters]] = replay_lengths(drafter, (text.fed(boundaries) for text in texts), k)
    ids = [text.text.id for text in texts]
    return estimate({length: tau_interval(rows, ids, bootstrap) for length, rows in lengths.items()}, costs)
