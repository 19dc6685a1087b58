"""Figures of acceptance, derived from stored counters. Pure functions, no torch.

Per request an engine counts verify steps V, drafted tokens D and, per position i = 1..k of the chain, how often the
draft at i and all before it were accepted, A_i; A = sum A_i. The bonus token of every verify step is counted in tau.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from eagle3x.types import EagleError, SpecCounters, total


@dataclass(frozen=True)
class Acceptance:
    """How a set of requests was accepted.

    tau: acceptance length 1 + A/V, over all verify steps (micro). tau_macro: mean of the requests' own tau; requests
    without a verify step have none and are left out. survival[i-1] = A_i / V. alpha[i-1] = A_i / A_(i-1) with A_0 = V;
    None where nothing was accepted before i. draft_efficiency = A / D; None if nothing was drafted.
    slot_use = tau / (k + 1): what some engine versions print as acceptance rate.
    """

    requests: int
    verify_steps: int
    drafted: int
    accepted: int
    tau: float
    tau_macro: float
    survival: tuple[float, ...]
    alpha: tuple[float | None, ...]
    draft_efficiency: float | None
    slot_use: float


def tau(counters: SpecCounters) -> float:
    """Acceptance length 1 + A/V. Raises EagleError without a verify step."""
    if counters.verify_steps == 0:
        raise EagleError("no verify step was counted, so there is no acceptance length")
    return 1 + counters.accepted / counters.verify_steps


def acceptance(counters: Sequence[SpecCounters]) -> Acceptance:
    """The figures of at least one request. Raises EagleError if no request had a verify step."""
    if not counters:
        raise EagleError("no request has counters, so there is no acceptance length")
    everything = total(counters)
    verify = everything.verify_steps
    micro = tau(everything)
    own = [tau(c) for c in counters if c.verify_steps]
    chain = (verify, *everything.accepted_at)
    return Acceptance(
        requests=len(counters),
        verify_steps=verify,
        drafted=everything.drafted,
        accepted=everything.accepted,
        tau=micro,
        tau_macro=sum(own) / len(own),
        survival=tuple(a / verify for a in everything.accepted_at),
        alpha=tuple(b / a if a else None for a, b in pairwise(chain)),
        draft_efficiency=everything.accepted / everything.drafted if everything.drafted else None,
        slot_use=micro / (len(everything.accepted_at) + 1),
    )


def by_category(counters: Sequence[SpecCounters], categories: Sequence[str]) -> dict[str, Acceptance]:
    """`acceptance` of each category that had a verify step, in alphabetical order."""
    groups: dict[str, list[SpecCounters]] = {}
    for counter, category in zip(counters, categories, strict=True):
        groups.setdefault(category, []).append(counter)
    return {name: acceptance(groups[name]) for name in sorted(groups) if any(c.verify_steps for c in groups[name])}
