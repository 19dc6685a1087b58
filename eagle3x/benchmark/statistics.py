"""Figures with their intervals, paired comparisons and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np

from eagle3x.benchmark.bootstrap import (
    NORMAL,
    Array,
    Bootstrap,
    Interval,
    Resampled,
    Statistic,
    bootstrapped,
    cluster_sums,
    interval,
    student_quantile,
)
from eagle3x.types import SpecCounters

POWER = 0.8
"""Chance to see a difference of the size that is called detectable."""
EXACT_SHARE = 0.98
HALF_WIDTH = 0.02
"""Agreement: share of equal requests (float32), and half-width of the paired difference (bfloat16)."""


@dataclass(frozen=True)
class Comparison:
    """A difference of two figures, of the same prompts or of two groups.

    detectable: the smallest difference that this many prompts show with 80 % power. p_value: two-sided, below
    1 - confidence where the interval excludes 0. verdict: a sentence.
    """

    difference: Interval
    detectable: float
    p_value: float
    prompts: int
    verdict: str

    def prompts_needed(self, difference: float) -> int:
        """Prompts that would show `difference` with 80 % power, by the spread seen here."""
        return prompts_needed(self.prompts, self.detectable, difference)


@dataclass(frozen=True)
class Agreement:
    """Whether an engine accepts what replay says that it should, request by request.

    identical: requests whose V and every A_i are equal; `differing` lists the others by index.
    paired_diff: tau served - tau replayed. prompts_needed: only with the verdict `cannot tell`.
    """

    requests: int
    identical: int
    differing: tuple[int, ...]
    paired_diff: Interval
    verdict: Literal["agree", "differ", "cannot tell"]
    prompts_needed: int | None
    sentence: str


def tau_of_sums(sums: Array) -> Array:
    """Acceptance length of sums (A, V) [..., 2]."""
    return 1 + sums[..., 0] / sums[..., 1]


def tau_difference(sums: Array) -> Array:
    """Difference of the acceptance lengths of sums (A, V, A, V) [..., 4]."""
    return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]


def tau_columns(counters: Sequence[SpecCounters]) -> Array:
    """[R, 2]: accepted A and verify steps V."""
    return np.array([(c.accepted, c.verify_steps) for c in counters], dtype=np.float64).reshape(-1, 2)


def tau_interval(counters: Sequence[SpecCounters], prompts: Sequence[str], bootstrap: Bootstrap) -> Interval:
    """Interval of the micro-averaged acceptance length, clustered by prompt."""
    return interval(cluster_sums(tau_columns(counters), prompts), tau_of_sums, bootstrap)


def survival_intervals(
    counters: Sequence[SpecCounters], prompts: Sequence[str], bootstrap: Bootstrap
) -> tuple[Interval, ...]:
    """Interval of A_i / V for each position."""
    positions = len(counters[0].accepted_at)
    rows = np.array([(*c.accepted_at, c.verify_steps) for c in counters], dtype=np.float64)
    sums = cluster_sums(rows, prompts)

    def share(position: int) -> Statistic:
        return lambda totals: totals[..., position] / totals[..., -1]

    return tuple(interval(sums, share(i), bootstrap) for i in range(positions))


def alpha_intervals(
    counters: Sequence[SpecCounters], prompts: Sequence[str], bootstrap: Bootstrap
) -> tuple[Interval | None, ...]:
    """Interval of A_i / A_(i-1), A_0 = V, for each position; None if nothing reached it.

    Where a single prompt reached it, the interval is all that is possible, 0 to 1.
    """
    rows = np.array([(c.verify_steps, *c.accepted_at) for c in counters], dtype=np.float64)
    sums = cluster_sums(rows, prompts)

    def share(position: int) -> Interval | None:
        reached, accepted = sums[:, position - 1], sums[:, position]
        if np.count_nonzero(reached) < 2:
            return Interval(float(accepted.sum() / reached.sum()), 0.0, 1.0) if reached.any() else None
        return interval(sums, lambda totals: totals[..., position] / totals[..., position - 1], bootstrap)

    return tuple(share(i) for i in range(1, rows.shape[1]))


def rate_interval(
    tokens: Sequence[float], seconds: Sequence[float], prompts: Sequence[str], bootstrap: Bootstrap
) -> Interval:
    """Tokens per second, summed tokens / summed seconds of the requests."""
    rows = np.array([tokens, seconds], dtype=np.float64).T
    return interval(cluster_sums(rows, prompts), lambda sums: sums[..., 0] / sums[..., 1], bootstrap)


def speedup_interval(
    baseline_seconds: Sequence[float], drafter_seconds: Sequence[float], prompts: Sequence[str], bootstrap: Bootstrap
) -> Interval:
    """Baseline time / drafter time for the same number of tokens, rows paired by request, clustered by prompt."""
    rows = np.array([baseline_seconds, drafter_seconds], dtype=np.float64).T
    return interval(cluster_sums(rows, prompts), lambda sums: sums[..., 0] / sums[..., 1], bootstrap)


def compare_tau(
    a: Sequence[SpecCounters],
    b: Sequence[SpecCounters],
    prompts: Sequence[str],
    bootstrap: Bootstrap,
    of_interest: float | None = None,
) -> Comparison:
    """tau(a) - tau(b), where row i of both is the same request.

    `of_interest`: the difference for which the verdict says how many prompts it takes; default: the one seen.
    """
    sums = cluster_sums(np.hstack([tau_columns(a), tau_columns(b)]), prompts)
    return compare(sums, tau_difference, bootstrap, of_interest)


def compare(sums: Array, statistic: Statistic, bootstrap: Bootstrap, of_interest: float | None = None) -> Comparison:
    """Compare two figures of the same prompts: `statistic` of `sums` [N, C] is their difference."""
    return compared(bootstrapped(sums, statistic, bootstrap), len(sums), bootstrap.confidence, of_interest)


def compared(found: Resampled, prompts: int, confidence: float, of_interest: float | None = None) -> Comparison:
    """What the difference `found` says; `of_interest` as in `compare_tau`.

    The smallest detectable difference is (t + z_power) standard errors, the usual size of a test's.
    """
    difference = found.interval(confidence)
    detectable = (student_quantile(1 - (1 - confidence) / 2, found.freedom) + NORMAL.inv_cdf(POWER)) * found.error
    if not difference.contains(0):
        verdict = f"a difference of {difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"
    elif detectable == 0:
        verdict = "no difference in any prompt"
    else:
        verdict = f"no difference shown (smallest detectable: {detectable:.3f}"
        size = abs(difference.value if of_interest is None else of_interest)
        if size > 0:
            verdict += f"; prompts needed for {size:.3f}: {prompts_needed(prompts, detectable, size)}"
        verdict += ")"
    return Comparison(difference, detectable, found.p_value(), prompts, verdict)


def prompts_needed(prompts: int, detectable: float, difference: float) -> int:
    """Prompts that would make `difference` detectable: the standard error falls with their square root."""
    if difference == 0:
        raise ValueError("no number of prompts shows a difference of 0")
    return max(2, ceil(prompts * (detectable / abs(difference)) ** 2))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjustment (Holm 1979), in the order given: significant if the adjusted value is < alpha."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return tuple(adjusted)


def agreement(
    served: Sequence[SpecCounters],
    replayed: Sequence[SpecCounters],
    prompts: Sequence[str],
    exact: bool,
    bootstrap: Bootstrap,
) -> Agreement:
    """Does the engine accept what replay predicts? Row i of all is the same request.

    exact (float32 on a CPU): V and every A_i equal in at least 98 % of the requests. Else (bfloat16): the paired
    difference served - replayed has an interval that contains 0 and a half-width of at most 0.02. So it excludes every
    figure beyond 0.04: what replay predicts for the boundaries b-1 and b+1 too, wherever that differs by more.
    """
    n = len(served)
    differing = tuple(i for i in range(n) if _walk(served[i]) != _walk(replayed[i]))
    identical = n - len(differing)
    sums = cluster_sums(np.hstack([tau_columns(served), tau_columns(replayed)]), prompts)
    difference = interval(sums, tau_difference, bootstrap)
    said = f"served - replayed = {difference.value:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})"

    def result(verdict: Literal["agree", "differ", "cannot tell"], sentence: str, m: int | None = None) -> Agreement:
        return Agreement(n, identical, differing, difference, verdict, m, sentence)

    if exact:
        verdict = "agree" if identical >= EXACT_SHARE * n else "differ"
        return result(verdict, f"{verdict}: counters equal in {identical} of {n} requests; {said}")
    if not difference.contains(0):
        return result("differ", f"differ: {said}")
    if difference.half_width <= HALF_WIDTH:
        return result("agree", f"agree: {said}")
    clusters = len(sums)
    needed = max(clusters + 1, ceil(clusters * (difference.half_width / HALF_WIDTH) ** 2))
    return result("cannot tell", f"cannot tell: {needed} prompts needed; {said}", needed)


def _walk(counters: SpecCounters) -> tuple[int, ...]:
    return (counters.verify_steps, *counters.accepted_at)
