"""Drift: the same tokens' states from somewhere else (engine, version, quantization, attention, batch), against the
reference.

    error_t    = |c_t - r_t| / |r_t|       of token t: c captured there, r of the reference, at the same boundary
    nearest    = the reference's boundary b' with the smallest median of |c_t - r'_t| / |c_t|, as in the capture probe,
                 if most tokens agree on it
    offset     = b' - b                    0 unless the capture is of another block
    noise      = median of |c_t - r'_t| / |r'_t|, r' at boundary b': what is left once the offset is taken away

The first tokens of a text (`probe.LEFT_OUT`) are left out, as in the capture probe: attention sinks live there, with
activations beside which nothing else is seen. Shapes: T tokens of a text, N tokens compared of all texts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3x.benchmark.bootstrap import Bootstrap, Interval
from eagle3x.benchmark.statistics import compare_tau, tau_interval
from eagle3x.diagnosis.captured_text import CapturedText, Captures, Text, captured
from eagle3x.diagnosis.probe import LEFT_OUT, SURE
from eagle3x.diagnosis.replay import replay
from eagle3x.types import EagleError, SpecCounters

if TYPE_CHECKING:
    from eagle3x.drafters.eagle3 import Eagle3

WORST = 5
"""Tokens that are listed for a boundary."""


@dataclass(frozen=True)
class WorstToken:
    """A token whose state is far off: position in its text, and |c - r| / |r|."""

    text: str
    position: int
    token_id: int
    error: float


@dataclass(frozen=True)
class Distance:
    """Of N tokens: medians of |c - r| / |r| and of the cosine, and the values that one in a hundred is worse than."""

    error: float
    error_p99: float
    cosine: float
    cosine_p1: float


@dataclass(frozen=True)
class BoundaryDrift:
    """What was captured for `boundary`.

    own: its distance to the reference at that boundary. nearest: the boundary that it is, by content; `offset` blocks
    away. noise: its distance to the reference there, the same as `own` without an offset.
    """

    boundary: int
    own: Distance
    nearest: int
    noise: Distance
    worst: tuple[WorstToken, ...]

    @property
    def offset(self) -> int:
        """Blocks too late (positive) or too early."""
        return self.nearest - self.boundary


@dataclass(frozen=True)
class Drift:
    """last: of the last hidden state, None where the two sides have it before and after the final norm."""

    boundaries: tuple[BoundaryDrift, ...]
    last: Distance | None
    texts: int
    tokens: int

    def nearest(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """What is really captured where `boundaries` are asked for."""
        found = {b.boundary: b.nearest for b in self.boundaries}
        return tuple(found[b] for b in boundaries)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        boundaries = [{**asdict(b), "worst": [asdict(w) for w in b.worst], "offset": b.offset} for b in self.boundaries]
        return {**asdict(self), "boundaries": boundaries, "tokens_left_out": LEFT_OUT}


@dataclass(frozen=True)
class Cost:
    """What drift costs: tau_replay of a drafter that is fed `boundaries`, from the reference and from the other states.

    difference = other - reference, paired by text, = offset + noise: the part of being fed other boundaries, exact
    states of them, and the part of what is left. Both are None without an offset: then all of it is noise.
    """

    boundaries: tuple[int, ...]
    fed: tuple[int, ...]
    num_speculative_tokens: int
    reference: Interval
    other: Interval
    difference: Interval
    detectable: float
    p_value: float
    verdict: str
    offset: Interval | None
    noise: Interval | None
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "boundaries": list(self.boundaries), "fed": list(self.fed)}


def drift(reference: Sequence[CapturedText], other: Sequence[CapturedText]) -> Drift:
    """How far `other` is from `reference`, at each boundary of `other`; texts are paired by id, in any order.

    The reference must have these boundaries. The more others it has, the further an offset is found.
    Raises EagleError for sides that are not comparable: other tokens, missing boundaries, nothing left to compare.
    """
    pairs = _paired(reference, other)
    boundaries = other[0].boundaries
    known = reference[0].boundaries
    if missing := sorted(set(boundaries) - set(known)):
        raise EagleError(f"drift: the reference has boundaries {list(known)}, but not {missing}")
    same_side = reference[0].last_norm == other[0].last_norm
    return Drift(
        tuple(_boundary(b, known, pairs) for b in boundaries),
        _distance([(r.last, o.last) for r, o in pairs]) if same_side else None,
        len(pairs),
        sum(len(o.text.token_ids) - LEFT_OUT for _, o in pairs),
    )


def batch_drift(engine: Captures, texts: Sequence[Text], boundaries: Sequence[int]) -> Drift:
    """What the company of others does to a text: each captured alone is the reference of all captured together."""
    alone = [one for text in texts for one in captured(engine, [text], boundaries)]
    return drift(alone, list(captured(engine, texts, boundaries)))


def cost(
    drafter: Eagle3,
    reference: Sequence[CapturedText],
    other: Sequence[CapturedText],
    found: Drift,
    boundaries: Sequence[int],
    num_speculative_tokens: int,
    bootstrap: Bootstrap,
) -> Cost:
    """What the drift that was `found` in `other` costs a drafter that is fed `boundaries` of it.

    Raises EagleError as `drift` and `replay` do, and for fewer than two texts, of which there is no interval.
    """
    pairs = _paired(reference, other)
    prompts = [r.text.id for r, _ in pairs]
    fed = found.nearest(boundaries)

    def counted(samples: Iterable[CapturedText], at: Sequence[int]) -> list[SpecCounters]:
        return replay(drafter, (sample.fed(at) for sample in samples), num_speculative_tokens)

    right = counted((r for r, _ in pairs), boundaries)
    drifted = counted((o for _, o in pairs), boundaries)
    compared = compare_tau(drifted, right, prompts, bootstrap)
    offset = noise = None
    if fed != tuple(boundaries):
        shifted = counted((r for r, _ in pairs), fed)
        offset = compare_tau(shifted, right, prompts, bootstrap).difference
        noise = compare_tau(drifted, shifted, prompts, bootstrap).difference
    return Cost(
        tuple(boundaries),
        fed,
        num_speculative_tokens,
        tau_interval(right, prompts, bootstrap),
        tau_interval(drifted, prompts, bootstrap),
        compared.difference,
        compared.detectable,
        compared.p_value,
        compared.verdict,
        offset,
        noise,
        compared.prompts,
    )


def _paired(
    reference: Sequence[CapturedText], other: Sequence[CapturedText]
) -> list[tuple[CapturedText, CapturedText]]:
    by_id = {one.text.id: one for one in other}
    if not reference or {r.text.id for r in reference} != set(by_id) or len(by_id) != len(other):
        raise EagleError(f"drift compares the same texts: {len(reference)} of the reference, {len(other)} of the other")
    pairs = [(r, by_id[r.text.id]) for r in reference]
    for r, o in pairs:
        if r.text.token_ids != o.text.token_ids:
            raise EagleError(f"drift: {r.text.id} has other tokens on the other side")
        if len(r.text.token_ids) <= LEFT_OUT:
            raise EagleError(f"drift: {r.text.id} has {len(r.text.token_ids)} tokens, of which {LEFT_OUT} are left out")
        if not all(torch.isfinite(state).all() for state in (o.aux, o.last)):
            raise EagleError(f"drift: {r.text.id} has states that are not finite")
    return pairs


def _boundary(boundary: int, known: Sequence[int], pairs: Sequence[tuple[CapturedText, CapturedText]]) -> BoundaryDrift:
    columns = [(r, o.at(boundary)) for r, o in pairs]
    far = {b: torch.cat([_relative(c, r.at(b), c) for r, c in columns]) for b in known}
    nearest = min(far, key=lambda b: (float(far[b].median()), abs(b - boundary)))
    if float((far[nearest] < far[boundary]).float().mean()) < SURE:
        nearest = boundary
    own = _distance([(r.at(boundary), c) for r, c in columns])
    noise = own if nearest == boundary else _distance([(r.at(nearest), c) for r, c in columns])
    errors_N = torch.cat([_errors(c, r.at(nearest)) for r, c in columns])
    return BoundaryDrift(boundary, own, nearest, noise, _worst(errors_N, pairs))


def _worst(errors_N: Tensor, pairs: Sequence[tuple[CapturedText, CapturedText]]) -> tuple[WorstToken, ...]:
    tokens = [(o.text, position) for _, o in pairs for position in range(LEFT_OUT, len(o.text.token_ids))]
    found = errors_N.topk(min(WORST, len(errors_N)))
    return tuple(
        WorstToken(text.id, position, text.token_ids[position], error)
        for error, (text, position) in zip(found.values.tolist(), (tokens[i] for i in found.indices), strict=True)
    )


def _distance(states: Sequence[tuple[Tensor, Tensor]]) -> Distance:
    """Of pairs (reference, other) [T, H]."""
    errors = torch.cat([_errors(other, reference) for reference, other in states]).double()
    cosines = torch.cat([_cosines(other, reference) for reference, other in states]).double()
    median, p99 = errors.quantile(torch.tensor([0.5, 0.99]).double()).tolist()
    p1, cosine = cosines.quantile(torch.tensor([0.01, 0.5]).double()).tolist()
    return Distance(median, p99, cosine, p1)


def _errors(other: Tensor, reference: Tensor) -> Tensor:
    """[T, H] twice -> [T - LEFT_OUT]: |c - r| / |r|."""
    return _relative(other, reference, reference)


def _relative(other: Tensor, reference: Tensor, to: Tensor) -> Tensor:
    """[T, H] thrice -> [T - LEFT_OUT]: |c - r| / |to|."""
    c, r, scale = (state[LEFT_OUT:].float() for state in (other, reference, to))
    return (c - r).norm(dim=1) / scale.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)


def _cosines(other: Tensor, reference: Tensor) -> Tensor:
    """[T, H] twice -> [T - LEFT_OUT], 1 for the same direction."""
    return torch.nn.functional.cosine_similarity(other[LEFT_OUT:].float(), reference[LEFT_OUT:].float(), dim=1)
