"""What a drafter will be worth, before it is served: the speed-up that its acceptance buys at measured step costs.

A verify step with k drafts yields tau_k tokens and takes the time of C_k plain decode steps, so while it decodes

    speed-up = tau_k / C_k        break-even: tau_k = C_k

(Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.8, with the measured cost
of a whole step in place of gamma c + 1). tau_k is what replay says of a chain of k drafts; C_k comes from a served
benchmark, of whatever drafter, or from step times by hand. Pure; nothing is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, hypot, log
from typing import Any, Literal

import numpy as np

from eagle3x.benchmark.bootstrap import Interval

Pays = Literal["yes", "no", "cannot tell", "never"]
"""never: even k + 1 tokens a step would not pay."""
ALWAYS = (
    "this is the decode speed-up: prefill and time to the first token are not in it",
    "greedy text, so that tau does not depend on the batch",
)
ON_LINES = "* not measured at this k: on straight lines through those that were, from a plain step at k = 0"


@dataclass(frozen=True)
class StepCosts:
    """What a verify step with its k drafts costs at a batch size, in plain decode steps.

    points: (k, cost) by ascending k, as measured or given. source: where from, for people.
    """

    batch: int
    points: tuple[tuple[int, Interval], ...]
    source: str

    def __post_init__(self) -> None:
        lengths = [k for k, _ in self.points]
        if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise ValueError(f"step costs need ascending numbers of drafts from 1 on, not {lengths}")
        if any(cost.low <= 0 for _, cost in self.points):
            raise ValueError("a step cannot cost less than nothing")

    def at(self, num_speculative_tokens: int) -> Interval:
        """C_k, on straight lines between (0, 1) and the points, and beyond the last of them."""
        k, ends = num_speculative_tokens, (Interval(1.0, 1.0, 1.0), *(cost for _, cost in self.points))
        lengths = [0, *(k for k, _ in self.points)]
        right = min(int(np.searchsorted(lengths, k)), len(lengths) - 1)
        share = (k - lengths[right - 1]) / (lengths[right] - lengths[right - 1])
        a, b = ends[right - 1], ends[right]
        value, low, high = (x + share * (y - x) for x, y in ((a.value, b.value), (a.low, b.low), (a.high, b.high)))
        return Interval(value, low, high)

    def measured(self, num_speculative_tokens: int) -> bool:
        """Whether C_k is a point, not a place on a line."""
        return num_speculative_tokens in dict(self.points)


@dataclass(frozen=True)
class Row:
    """A chain of k drafts at a batch size. step_cost is also the break-even tau."""

    num_speculative_tokens: int
    batch: int
    tau: Interval
    step_cost: Interval
    cost_measured: bool
    speedup: Interval
    pays: Pays


@dataclass(frozen=True)
class Estimate:
    """rows: by batch, then k. best: by batch the k of the largest speed-up; None where no k is worth a drafter."""

    rows: tuple[Row, ...]
    best: dict[int, int | None]
    sources: dict[int, str]

    @property
    def assumptions(self) -> list[str]:
        """What the figures rest on besides tau and costs."""
        return [*ALWAYS, *([] if all(row.cost_measured for row in self.rows) else [ON_LINES])]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "best": {str(batch): k for batch, k in self.best.items()},
            "sources": {str(batch): source for batch, source in self.sources.items()},
            "assumptions": self.assumptions,
        }


def estimate(taus: Mapping[int, Interval], costs: Sequence[StepCosts]) -> Estimate:
    """The table of every k in `taus` at every batch in `costs`.

    taus: acceptance length by number of drafts; a chain of k walks the text in other steps than one of k - 1, so each
    is replayed (`replay.replay_lengths`) rather than summed from one survival. The interval of a speed-up joins both
    intervals on a log scale (Zou and Donner 2008, "Construction of confidence limits about effect measures").
    """
    rows = [_row(k, cost, taus[k]) for cost in sorted(costs, key=lambda c: c.batch) for k in sorted(taus)]
    best: dict[int, int | None] = {}
    for batch in dict.fromkeys(row.batch for row in rows):
        top = max((row for row in rows if row.batch == batch), key=lambda row: row.speedup.value)
        best[batch] = top.num_speculative_tokens if top.speedup.value > 1 else None
    return Estimate(tuple(rows), best, {cost.batch: cost.source for cost in costs})


def taus_of_survival(survival: Sequence[float]) -> dict[int, Interval]:
    """tau_k = 1 + survival_1 + .. + survival_k for each k, without an interval.

    Exact for the whole chain alone: a shorter one starts its steps elsewhere. Raises ValueError for what is no
    survival.
    """
    if not survival or any(not 0 <= s <= 1 for s in survival) or sorted(survival, reverse=True) != list(survival):
        raise ValueError(f"survival is shares of 0 to 1 that do not rise with the position, not {list(survival)}")
    sums = 1 + np.cumsum(survival)
    return {k: Interval(float(tau), float(tau), float(tau)) for k, tau in enumerate(sums, 1)}


def costs_of_times(batch: int, plain_step: float, verify_step: float, draft_step: float, longest: int) -> StepCosts:
    """From three times in one unit: C_k = (verify_step + k draft_step) / plain_step, for k up to `longest`.

    verify_step: of k + 1 tokens, taken to be the same for every k, as it is while memory bounds the step.
    """
    costs = [(k, (verify_step + k * draft_step) / plain_step) for k in range(1, longest + 1)]
    return StepCosts(
        batch,
        tuple((k, Interval(c, c, c)) for k, c in costs),
        "step times given; a verify step is taken to cost the same at every k",
    )


def measured_cost(tau: float, decode_speedup: Interval) -> Interval:
    """C_k of a timing pass: its own acceptance length / its decode speed-up."""
    return Interval(tau / decode_speedup.value, tau / decode_speedup.high, tau / decode_speedup.low)


def _row(k: int, costs: StepCosts, tau: Interval) -> Row:
    cost = costs.at(k)
    value = tau.value / cost.value
    below = hypot(log(tau.value / tau.low), log(cost.high / cost.value))
    above = hypot(log(tau.high / tau.value), log(cost.value / cost.low))
    speedup = Interval(value, value * exp(-below), value * exp(above))
    pays: Pays = "yes" if speedup.low > 1 else "no" if speedup.high < 1 else "cannot tell"
    if cost.low > k + 1:
        pays = "never"
    return Row(k, costs.batch, tau, cost, costs.measured(k), speedup, pays)
