"""Intervals on processes whose truth is known, and verdicts on hand-made counters."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3x.benchmark.bootstrap import Bootstrap, cluster_sums, interval, student_cdf, student_quantile
from eagle3x.benchmark.statistics import (
    agreement,
    alpha_intervals,
    compare,
    compare_tau,
    holm,
    prompts_needed,
    rate_interval,
    speedup_interval,
    survival_intervals,
    tau_interval,
)
from eagle3x.types import EagleError, SpecCounters

BOOT = Bootstrap(resamples=2000, confidence=0.95, seed=3)


def chains(seed: int, prompts: int, shape: tuple[float, float] = (1.5, 4.0)) -> list[SpecCounters]:
    """Prompts of unequal difficulty and length: draft i is accepted with the prompt's own probability."""
    rng = np.random.default_rng(seed)
    p = rng.beta(*shape, size=prompts)
    v = rng.integers(15, 45, size=prompts)
    a1 = rng.binomial(v, p)
    a2 = rng.binomial(a1, p)
    a3 = rng.binomial(a2, p)
    return [
        SpecCounters(int(n), 3 * int(n), (int(x), int(y), int(z))) for n, x, y, z in zip(v, a1, a2, a3, strict=True)
    ]


def ids(n: int) -> list[str]:
    return [f"p{i}" for i in range(n)]


def flat(verify: int, *accepted: int) -> SpecCounters:
    return SpecCounters(verify, verify * len(accepted), accepted)


@pytest.mark.parametrize("prompts", [12, 48])
def test_ninety_five_percent_of_intervals_hold_the_truth(prompts: int) -> None:
    # V is independent of p, so the truth is 1 + E[p + p^2 + p^3], p ~ Beta(1.5, 4): moments by a(a+1).../(a+b)...
    a, b = 1.5, 4.0
    first = a / (a + b)
    second = first * (a + 1) / (a + b + 1)
    truth = 1 + first + second + second * (a + 2) / (a + b + 2)
    experiments, hits = 1000, 0
    quick = Bootstrap(resamples=600, confidence=0.95, seed=1)
    for seed in range(experiments):
        found = tau_interval(chains(seed + 10_000 * prompts, prompts), ids(prompts), quick)
        hits += found.contains(truth)
    assert 0.93 <= hits / experiments <= 0.97


def test_requests_of_one_prompt_are_one_cluster() -> None:
    counters = chains(5, 20)
    alone = tau_interval(counters, ids(20), BOOT)
    repeated = tau_interval(counters * 4, ids(20) * 4, BOOT)
    unclustered = tau_interval(counters * 4, ids(80), BOOT)
    assert (repeated.low, repeated.high) == pytest.approx((alone.low, alone.high))
    assert unclustered.half_width < 0.7 * alone.half_width


def test_cluster_sums_keep_the_order_of_first_appearance() -> None:
    sums = cluster_sums(np.array([[1.0, 2], [10, 20], [100, 200]]), ["b", "a", "b"])
    assert sums.tolist() == [[101, 202], [10, 20]]


def test_turns_of_one_conversation_are_one_cluster_of_every_interval() -> None:
    counters, ids_ = chains(5, 20), ids(20)
    turns = ids_ + [f"{name}#2" for name in ids_]
    found = tau_interval(counters * 2, turns, BOOT)
    assert found == tau_interval(counters, ids_, BOOT)
    assert compare_tau(counters * 2, chains(6, 20) * 2, turns, BOOT).prompts == 20
    with pytest.raises(EagleError, match="at least 2 prompts, not 1"):
        tau_interval(counters[:2], ["talk", "talk#2"], BOOT)


def test_a_constant_has_an_interval_without_width() -> None:
    found = tau_interval([flat(10, 10, 10, 10)] * 8, ids(8), BOOT)
    assert (found.value, found.low, found.high) == pytest.approx((4, 4, 4))


def test_one_prompt_has_no_interval() -> None:
    with pytest.raises(EagleError, match="at least 2 prompts"):
        tau_interval([flat(10, 5)], ids(1), BOOT)


def test_no_verify_step_at_all_is_an_error() -> None:
    with pytest.raises(EagleError, match="undefined"):
        tau_interval([flat(0, 0)] * 3, ids(3), BOOT)


def test_interval_is_that_of_the_normal_for_a_mean_of_many() -> None:
    values = np.random.default_rng(0).normal(10, 2, size=400)
    columns = np.stack([values, np.ones(400)], axis=1)
    found = interval(columns, lambda s: s[..., 0] / s[..., 1], Bootstrap(8000, 0.95, 0))
    error = 1.96 * values.std(ddof=1) / 20
    assert found.low == pytest.approx(values.mean() - error, abs=0.02)
    assert found.high == pytest.approx(values.mean() + error, abs=0.02)


def test_more_confidence_is_wider() -> None:
    counters = chains(1, 30)
    narrow = tau_interval(counters, ids(30), Bootstrap(2000, 0.8, 0))
    wide = tau_interval(counters, ids(30), Bootstrap(2000, 0.99, 0))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_survival_by_position() -> None:
    found = survival_intervals([flat(10, 5, 2), flat(10, 7, 0)], ids(2), BOOT)
    assert [s.value for s in found] == pytest.approx([12 / 20, 2 / 20])


def test_alpha_is_of_what_reached_the_position() -> None:
    found = alpha_intervals([flat(10, 5, 2, 0), flat(10, 7, 1, 0)], ids(2), BOOT)
    assert [a and a.value for a in found] == pytest.approx([12 / 20, 3 / 12, 0.0])
    assert alpha_intervals([flat(10, 0, 0), flat(9, 0, 0)], ids(2), BOOT)[1] is None


def test_alpha_that_one_prompt_alone_reached_may_be_anything() -> None:
    (_, second) = alpha_intervals([flat(10, 4, 1), flat(10, 0, 0), flat(9, 0, 0)], ids(3), BOOT)
    assert second is not None
    assert (second.value, second.low, second.high) == (0.25, 0.0, 1.0)


def test_a_rate_is_summed_tokens_by_summed_seconds() -> None:
    found = rate_interval([24.0, 24.0, 12.0], [2.0, 4.0, 2.0], ["a", "b", "b"], BOOT)
    assert found.value == pytest.approx(60 / 8)
    assert (found.low, found.high) == pytest.approx((36 / 6, 24 / 2))  # either prompt alone


@pytest.mark.parametrize(
    ("freedom", "table"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (47, 2.012), (1000, 1.962)]
)
def test_student_quantiles_are_those_of_the_table(freedom: int, table: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(table, abs=1e-3)
    assert student_quantile(0.025, freedom) == pytest.approx(-table, abs=1e-3)
    assert student_cdf(table, freedom) == pytest.approx(0.975, abs=1e-4)


def test_pairing_by_prompt_finds_what_two_intervals_hide() -> None:
    strong = chains(2, 60)
    # The same prompts, one accepted token in ten verify steps fewer.
    weak = [SpecCounters(c.verify_steps, c.drafted, (max(c.accepted_at[1], c.accepted_at[0] - c.verify_steps // 10),
            *c.accepted_at[1:])) for c in strong]  # fmt: skip
    a, b = tau_interval(strong, ids(60), BOOT), tau_interval(weak, ids(60), BOOT)
    paired = compare_tau(strong, weak, ids(60), BOOT)
    assert a.low < b.high, "unpaired, the intervals overlap"
    assert paired.difference.low > 0
    assert paired.difference.value == pytest.approx(a.value - b.value)
    assert paired.p_value < 0.01
    assert paired.verdict.startswith("a difference of +0.0")


def test_a_p_value_is_that_of_the_t_test_for_a_mean() -> None:
    values = np.random.default_rng(4).normal(0.9, 2, size=20)
    found = compare(
        np.stack([values, np.ones(20)], axis=1), lambda s: s[..., 0] / s[..., 1], Bootstrap(20_000, 0.95, 0)
    )
    t = values.mean() / (values.std(ddof=1) / np.sqrt(20))
    assert found.p_value == pytest.approx(2 * (1 - student_cdf(t, 19)), abs=0.02)


@pytest.mark.parametrize("seed", range(12))
def test_a_p_value_and_its_interval_never_contradict_each_other(seed: int) -> None:
    a, b = chains(seed, 12), chains(seed, 12, (1.6, 4.0))
    found = compare_tau(a, b, ids(12), BOOT)
    confidence = 1 - found.p_value
    inside = compare_tau(a, b, ids(12), Bootstrap(2000, min(confidence + 0.02, 0.999), BOOT.seed))
    outside = compare_tau(a, b, ids(12), Bootstrap(2000, max(confidence - 0.02, 0.001), BOOT.seed))
    assert inside.difference.contains(0) or found.p_value < 0.01  # where the resamples themselves end
    assert not outside.difference.contains(0)


def test_equal_processes_show_no_difference_and_say_what_would_show_one() -> None:
    paired = compare_tau(chains(11, 40), chains(12, 40), ids(40), BOOT, of_interest=0.08)
    assert paired.difference.contains(0)
    needed = paired.prompts_needed(0.08)
    assert paired.verdict == (
        f"no difference shown (smallest detectable: {paired.detectable:.3f}; prompts needed for 0.080: {needed})"
    )
    assert needed == prompts_needed(40, paired.detectable, 0.08) > 40


def test_prompts_needed_grow_with_the_square() -> None:
    assert prompts_needed(50, 0.2, 0.1) == 200
    assert prompts_needed(50, 0.2, 0.2) == 50
    with pytest.raises(ValueError, match="difference of 0"):
        prompts_needed(50, 0.2, 0)


def test_the_detectable_difference_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(7)
    n, spread = 50, 1.0
    quick = Bootstrap(500, 0.95, 0)

    def run(shift: float) -> tuple[bool, float]:
        columns = np.stack([rng.normal(shift, spread, n), np.ones(n)], axis=1)
        found = compare(columns, lambda s: s[..., 0] / s[..., 1], quick)
        return not found.difference.contains(0), found.detectable

    size = float(np.mean([run(0.0)[1] for _ in range(50)]))
    assert size == pytest.approx((1.96 + 0.84) * spread / np.sqrt(n), rel=0.06)
    assert np.mean([run(size)[0] for _ in range(400)]) == pytest.approx(0.8, abs=0.06)


def test_a_difference_that_is_the_same_in_every_prompt_is_certain() -> None:
    paired = compare_tau([flat(10, 5)] * 6, [flat(10, 4)] * 6, ids(6), BOOT)
    assert (paired.difference.low, paired.difference.high, paired.p_value) == pytest.approx((0.1, 0.1, 0))


def test_identical_counters_show_no_difference_in_any_prompt() -> None:
    paired = compare_tau(chains(3, 10), chains(3, 10), ids(10), BOOT)
    assert paired.verdict == "no difference in any prompt"
    assert paired.p_value == 1.0


def test_speedup_is_the_ratio_of_summed_times() -> None:
    found = speedup_interval([2.0, 4.0, 6.0], [1.0, 2.0, 2.0], ["a", "b", "c"], BOOT)
    assert found.value == pytest.approx(12 / 5)
    assert found.low <= found.value <= found.high


def test_speedup_of_exactly_half_the_time_is_two_in_every_resample() -> None:
    found = speedup_interval([2.0, 40.0, 6.0], [1.0, 20.0, 3.0], ["a", "b", "c"], BOOT)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.5: times 4, 3, 2, 1 -> 0.04, 0.06, 0.06, 0.5.
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx((0.06, 0.04, 0.5, 0.06))
    assert holm([0.6, 0.7]) == (1.0, 1.0)
    assert holm([]) == ()


def test_exact_agreement_takes_98_percent_of_equal_requests() -> None:
    served = chains(4, 50)
    one_off = [*served[:-1], flat(99, 1, 1, 1)]
    two_off = [*one_off[:-2], flat(98, 1, 1, 1), one_off[-1]]
    assert agreement(served, served, ids(50), True, BOOT).verdict == "agree"
    almost = agreement(served, one_off, ids(50), True, BOOT)
    assert (almost.verdict, almost.identical, almost.differing) == ("agree", 49, (49,))
    assert agreement(served, two_off, ids(50), True, BOOT).verdict == "differ"


def test_exact_agreement_is_by_position_not_by_sum() -> None:
    assert agreement([flat(10, 4, 2)] * 4, [flat(10, 5, 1)] * 4, ids(4), True, BOOT).verdict == "differ"


def jitter(counters: list[SpecCounters], seed: int, size: int, shift: int = 0) -> list[SpecCounters]:
    """The same requests, with the first position's count moved by `shift` +- `size`."""
    # Balanced: as many requests up as down, in random order.
    steps = np.resize(np.arange(-size, size + 1), len(counters) - len(counters) % (2 * size + 1))
    steps = np.random.default_rng(seed).permutation(np.concatenate([steps, np.zeros(len(counters) - len(steps), int)]))
    moved = [c.accepted_at[0] + shift + int(step) for c, step in zip(counters, steps, strict=True)]
    return [
        SpecCounters(c.verify_steps, c.drafted, (min(c.verify_steps, max(c.accepted_at[1], m)), *c.accepted_at[1:]))
        for c, m in zip(counters, moved, strict=True)
    ]


def steady(n: int) -> list[SpecCounters]:
    return [flat(40, 20, 8, 2)] * n


def test_bf16_agreement_within_a_narrow_interval() -> None:
    found = agreement(jitter(steady(200), 0, 1), steady(200), ids(200), False, BOOT)
    assert found.verdict == "agree"
    assert found.prompts_needed is None
    # So a neighbouring boundary that replay sees 0.04 away is excluded, on either side.
    assert not found.paired_diff.contains(0.0401)
    assert not found.paired_diff.contains(-0.0401)


def test_bf16_a_difference_is_a_difference() -> None:
    found = agreement(jitter(steady(200), 0, 1, shift=-4), steady(200), ids(200), False, BOOT)
    assert found.verdict == "differ"
    assert found.paired_diff.value == pytest.approx(-0.1, abs=0.01)


def test_bf16_too_few_prompts_cannot_tell_and_says_how_many_it_takes() -> None:
    served, replayed = jitter(steady(13), 0, 6), steady(13)
    found = agreement(served, replayed, ids(13), False, BOOT)
    assert found.verdict == "cannot tell"
    assert found.paired_diff.half_width > 0.02
    needed = 13 * (found.paired_diff.half_width / 0.02) ** 2
    assert found.prompts_needed == pytest.approx(needed, abs=1)
    assert found.sentence.startswith(f"cannot tell: {found.prompts_needed} prompts needed")
