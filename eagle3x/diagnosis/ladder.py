"""The ladder: where acceptance is lost between the module that was trained and the engine that serves it.

Each rung is a tau on the same prompts, and differs from the one above it in one thing:

    trained     the module as trained, on held-out text, with the states that the extracting engine captures
    exported    the checkpoint as it is served, reloaded from disk
    responses   the text that the served target writes
    states      the states that the serving engine captures, at the boundaries that it is predicted to feed
    served      the engine itself

So shares are sequential: what two faults cost together is told as the first one's. Differences are paired by prompt,
their p-values adjusted for all rungs together (Holm). A rung that was not climbed is stepped over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from eagle3x.benchmark.statistics import Bootstrap, Comparison, Interval, compare_tau, holm, tau_interval
from eagle3x.types import EagleError, SpecCounters

RungName = Literal["trained", "exported", "responses", "states", "served"]
RUNGS: tuple[RungName, ...] = ("trained", "exported", "responses", "states", "served")
CHANGES: dict[RungName, str] = {
    "trained": "the drafter and its training",
    "exported": "the export",
    "responses": "the text",
    "states": "the states that are fed",
    "served": "the engine",
}
"""What each rung changes: the stage to blame if it is lost there."""
SIGNIFICANT = 0.05
LEAST_LOSS, LEAST_SHARE = 0.02, 0.05
"""A loss counts from 0.02 of tau on, or from 5 % of tau - 1 where that is more."""


@dataclass(frozen=True)
class Rung:
    """Counters by prompt, or the reason why there are none. `what` is fed, read and asked, in one line."""

    name: RungName
    what: str
    counters: tuple[SpecCounters, ...] | None
    skipped: str | None = None


@dataclass(frozen=True)
class Step:
    """From the rung `above` to this one: the paired difference of tau. `threshold`: the loss that counts.

    verdict: `broken` is significant and at least the threshold; `cannot tell` is not, but such a loss would not have
    been seen on so many prompts (`prompts_needed` would show it); else `sound`.
    """

    rung: RungName
    above: RungName
    difference: Interval
    p_holm: float
    threshold: float
    detectable: float
    verdict: Literal["sound", "broken", "cannot tell"]
    prompts_needed: int | None


@dataclass(frozen=True)
class Ladder:
    """What was climbed. `taus`: of each rung, None where it was skipped. `prompts`: they are the same on all rungs."""

    rungs: tuple[Rung, ...]
    taus: tuple[Interval | None, ...]
    steps: tuple[Step, ...]
    prompts: int

    @property
    def first(self) -> RungName:
        """The first rung that was climbed."""
        return next(rung.name for rung in self.rungs if rung.counters is not None)

    @property
    def broken(self) -> tuple[Step, ...]:
        """The broken rungs, earliest first."""
        return tuple(step for step in self.steps if step.verdict == "broken")

    @property
    def largest(self) -> Step | None:
        """The rung that lost most: the verdict."""
        return min(self.broken, key=lambda step: step.difference.value, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rungs": [
                {
                    "name": rung.name,
                    "what": rung.what,
                    "skipped": rung.skipped,
                    "tau": None if tau is None else asdict(tau),
                }
                for rung, tau in zip(self.rungs, self.taus, strict=True)
            ],
            "steps": [asdict(step) for step in self.steps],
            "prompts": self.prompts,
            "broken": [step.rung for step in self.broken],
            "largest": None if self.largest is None else self.largest.rung,
            "earliest": self.broken[0].rung if self.broken else None,
        }


def climb(rungs: Sequence[Rung], prompts: Sequence[str], bootstrap: Bootstrap) -> Ladder:
    """Compare each rung with the last one above it that was climbed. Row i of all counters is `prompts[i]`.

    Raises EagleError if no rung was climbed.
    """
    climbed = [(rung, rung.counters) for rung in rungs if rung.counters is not None]
    if not climbed:
        reasons = "; ".join(f"{rung.name}: {rung.skipped}" for rung in rungs)
        raise EagleError(f"no rung of the ladder could be climbed: {reasons}")
    taus = [None if rung.counters is None else tau_interval(rung.counters, prompts, bootstrap) for rung in rungs]
    by_name = {rung.name: tau for rung, tau in zip(rungs, taus, strict=True)}
    pairs = list(pairwise(climbed))
    compared = [compare_tau(here, above, prompts, bootstrap) for (_, above), (_, here) in pairs]
    adjusted = holm([comparison.p_value for comparison in compared])
    steps = [
        _step(above.name, here.name, by_name[above.name], comparison, p)
        for ((above, _), (here, _)), comparison, p in zip(pairs, compared, adjusted, strict=True)
    ]
    return Ladder(tuple(rungs), tuple(taus), tuple(steps), len(set(prompts)))


def loss_that_counts(tau: float) -> float:
    """The least loss from `tau` on that is called one."""
    return max(LEAST_LOSS, LEAST_SHARE * (tau - 1))


def _step(above: RungName, rung: RungName, tau: Interval | None, comparison: Comparison, p_holm: float) -> Step:
    assert tau is not None, "a rung that was climbed has a tau"
    threshold = loss_that_counts(tau.value)
    lost = -comparison.difference.value
    seen = p_holm < SIGNIFICANT and lost > 0
    if seen and lost >= threshold:
        verdict, needed = "broken", None
    elif not seen and comparison.detectable > threshold:
        verdict, needed = "cannot tell", comparison.prompts_needed(threshold)
    else:
        verdict, needed = "sound", None
    return Step(rung, above, comparison.difference, p_holm, threshold, comparison.detectable, verdict, needed)
