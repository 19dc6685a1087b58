"""Seeds and prompts crossed: known spreads, and the analysis of variance written out."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3x.benchmark.bootstrap import Array, Bootstrap
from eagle3x.benchmark.seeds import compare_pooled, pool, pool_tau
from eagle3x.benchmark.statistics import tau_interval
from eagle3x.types import EagleError, SpecCounters

BOOT = Bootstrap(4000, 0.95, 3)


def mean(sums: Array) -> Array:
    return sums[..., 0] / sums[..., 1]


def table(seeds: list[float], prompts: Array, noise: Array) -> Array:
    """Values seed + prompt + noise, [S, N], as sums of one row each."""
    values = np.array(seeds)[:, None] + prompts + noise
    return np.stack([values, np.ones_like(values)], axis=-1)


def flat(verify: int, *accepted: int) -> SpecCounters:
    return SpecCounters(verify, verify * len(accepted), accepted)


def test_the_spread_of_seeds_is_that_of_a_two_way_analysis_of_variance() -> None:
    rng = np.random.default_rng(1)
    sums = table([0.0, 1.0, 3.0], rng.normal(0, 2, 40), rng.normal(0, 1, (3, 40)))
    found = pool(sums, mean, BOOT)
    y = sums[..., 0]
    residual = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    between = 40 * y.mean(1).var(ddof=1)
    within = (residual**2).sum() / (2 * 39)
    assert found.spread == pytest.approx(np.sqrt((between - within) / 40))
    assert found.by_seeds == pytest.approx(4.303 * found.spread / np.sqrt(3), rel=1e-3)
    assert found.per_seed == pytest.approx(y.mean(1))
    assert found.figure.value == pytest.approx(y.mean())
    # The half-widths join as the sides of a right angle.
    assert (found.figure.high - found.figure.value) ** 2 == pytest.approx(
        (found.by_prompts.high - found.by_prompts.value) ** 2 + found.by_seeds**2
    )


def test_equal_seeds_leave_the_interval_of_the_prompts() -> None:
    counters = [flat(10 + i, i, i // 2) for i in range(2, 12)]
    ids = [f"p{i}" for i in range(10)]
    found = pool_tau([counters] * 3, ids, BOOT)
    alone = tau_interval(counters, ids, BOOT)
    assert (found.spread, found.by_seeds) == pytest.approx((0, 0), abs=1e-9)
    assert (found.figure.low, found.figure.high) == pytest.approx((alone.low, alone.high))


def test_differences_between_prompts_alone_are_no_spread_of_seeds() -> None:
    # Each seed is better on other prompts, all the same on the whole: less than its own noise would make.
    noise = np.array([[1.0, -1.0] * 10, [-1.0, 1.0] * 10])
    found = pool(table([0.0, 0.0], np.arange(20.0), noise), mean, BOOT)
    assert found.spread == 0


def test_two_turns_are_one_prompt() -> None:
    by_seed = [
        [flat(10, 4), flat(10, 6), flat(10, 2), flat(20, 9)],
        [flat(10, 5), flat(10, 5), flat(9, 3), flat(20, 8)],
    ]
    assert pool_tau(by_seed, ["a", "a#2", "b", "b#2"], BOOT).prompts == 2


def test_a_difference_that_two_seeds_share_is_shown_and_one_of_a_single_seed_is_not() -> None:
    rng = np.random.default_rng(2)
    ids = [f"p{i}" for i in range(40)]
    base = [[flat(40, int(a)) for a in rng.integers(10, 20, 40)] for _ in range(3)]
    better = [[flat(40, c.accepted + 4) for c in seed] for seed in base]
    found = compare_pooled(better, base, ids, BOOT)
    assert found.figure.value == pytest.approx(0.1)
    assert found.figure.low > 0
    assert found.p_value < 0.01
    lucky = compare_pooled([better[0], *base[1:]], base, ids, BOOT)
    assert lucky.by_prompts.low > 0, "the prompts alone would say so"
    assert lucky.figure.contains(0)
    assert lucky.p_value > 0.05


def test_a_p_value_is_where_the_interval_ends_at_0() -> None:
    rng = np.random.default_rng(6)
    sums = table([0.2, 0.9, 0.7], rng.normal(0, 1, 30), rng.normal(0, 1, (3, 30)))
    found = pool(sums, mean, BOOT)
    assert 0.001 < found.p_value < 0.5
    ends = pool(sums, mean, Bootstrap(4000, 1 - found.p_value, 3)).figure
    assert ends.low == pytest.approx(0, abs=2e-3)


def test_few_seeds_are_said_to_say_little() -> None:
    rng = np.random.default_rng(3)
    few = pool(table([0.0, 1.0, 3.0], rng.normal(0, 2, 40), rng.normal(0, 1, (3, 40))), mean, BOOT)
    assert "3 seeds say little of others: t of 2 degrees of freedom, 4.3 at 95 %" in few.sentence
    many = pool(table([0.0] * 8, rng.normal(0, 2, 40), rng.normal(0, 1, (8, 40))), mean, BOOT)
    assert "say little" not in many.sentence


def test_one_seed_has_no_spread() -> None:
    with pytest.raises(EagleError, match="at least 2 of them, not 1"):
        pool_tau([[flat(10, 4), flat(10, 6)]], ["a", "b"], BOOT)
