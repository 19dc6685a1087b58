"""Differences between two independent groups of prompts: train against held-out text, one set against another.

Nothing is paired here, so that prompts of unequal difficulty count in full. The same figure on the same prompts is
compared by `statistics.compare_tau`, which is far sharper.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from eagle3x.benchmark.bootstrap import (
    Array,
    Bootstrap,
    Statistic,
    cluster_sums,
    defined,
    influence,
    require_prompts,
    resample,
    resampled,
)
from eagle3x.benchmark.statistics import Comparison, compared, tau_columns, tau_of_sums
from eagle3x.types import SpecCounters


def gap_tau(
    a: Sequence[SpecCounters],
    prompts_a: Sequence[str],
    b: Sequence[SpecCounters],
    prompts_b: Sequence[str],
    bootstrap: Bootstrap,
    of_interest: float | None = None,
) -> Comparison:
    """tau(a) - tau(b) of two groups of requests that share no prompt; for overfit `a` is train, `b` held-out text.

    Its `prompts` are those of both groups: `prompts_needed` keeps their proportion. Raises EagleError for fewer than
    two prompts in a group.
    """
    sums_a, sums_b = cluster_sums(tau_columns(a), prompts_a), cluster_sums(tau_columns(b), prompts_b)
    return gap(sums_a, sums_b, tau_of_sums, bootstrap, of_interest)


def gap(a: Array, b: Array, statistic: Statistic, bootstrap: Bootstrap, of_interest: float | None = None) -> Comparison:
    """`statistic(a) - statistic(b)` of the summed rows of `a` [N, C] and `b` [M, C].

    Each group is resampled by itself. As in `statistics.interval`, with the groups' influences together for the
    acceleration and Student's t with Welch's degrees of freedom (Welch 1947, "The generalization of 'Student's'
    problem when several different population variances are involved").
    """
    groups = (a, b)
    sizes = [require_prompts(group) for group in groups]
    values = [float(defined(statistic, group.sum(0))) for group in groups]
    figures = resample(a, statistic, bootstrap, 0) - resample(b, statistic, bootstrap, 1)
    own = [influence(group, statistic) for group in groups]
    seen = [float((i**2).sum()) for i in own]
    variances = [v * n / (n - 1) for v, n in zip(seen, sizes, strict=True)]
    freedom, widening = float(sum(sizes) - 2), 1.0
    if sum(seen) > 0:
        freedom = sum(variances) ** 2 / sum(v**2 / (n - 1) for v, n in zip(variances, sizes, strict=True))
        widening = sqrt(sum(variances) / sum(seen))
    influences = np.concatenate([own[0], -own[1]])
    found = resampled(values[0] - values[1], figures, influences, freedom, widening, bootstrap)
    return compared(found, sum(sizes), bootstrap.confidence, of_interest)
