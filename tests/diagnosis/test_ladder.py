"""Ladders whose losses are known beforehand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from eagle3x.benchmark.bootstrap import Bootstrap, Interval
from eagle3x.diagnosis.evidence import Evidence, causes
from eagle3x.diagnosis.ladder import RUNGS, Ladder, Rung, climb, loss_that_counts
from eagle3x.diagnosis.offset_quantization import two_by_two
from eagle3x.types import EagleError, SpecCounters

BOOTSTRAP = Bootstrap(resamples=1000)
PROMPTS = [f"p{i}" for i in range(48)]


def counted(alpha: float, seed: int = 0, steps: int = 30, k: int = 3, prompts: int = 48) -> tuple[SpecCounters, ...]:
    """Requests of `steps` verify steps in which a draft is accepted with probability `alpha`."""
    found = []
    for prompt in range(prompts):
        draws = random.Random(f"{seed} {prompt}")  # the same prompt is as easy on every rung
        accepted = [0] * k
        for _ in range(steps):
            for position in range(k):
                if draws.random() >= alpha:
                    break
                accepted[position] += 1
        found.append(SpecCounters(steps, steps * k, tuple(accepted)))
    return tuple(found)


def ladder(*alphas: float | None, seeds: Sequence[int] = (0, 0, 0, 0, 0)) -> Ladder:
    rungs = [
        Rung(name, "as told", None if alpha is None else counted(alpha, seed), None if alpha else "no engine")
        for name, alpha, seed in zip(RUNGS, alphas, seeds, strict=True)
    ]
    return climb(rungs, PROMPTS, BOOTSTRAP)


def test_equal_counters_are_sound() -> None:
    found = ladder(0.4, 0.4, 0.4, 0.4, 0.4)
    assert found.broken == ()
    assert found.largest is None
    assert [step.verdict for step in found.steps] == ["sound"] * 4
    assert all(step.difference.value == 0 and step.p_holm == 1 for step in found.steps)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_loss_is_found_on_its_rung(at: int) -> None:
    found = ladder(*[0.5 if i < at else 0.3 for i in range(5)])
    assert [step.rung for step in found.broken] == [RUNGS[at]]
    # tau is 1 + a + a^2 + a^3: 1.875 at 0.5, 1.417 at 0.3
    assert found.broken[0].difference.value == pytest.approx(-0.458, abs=0.08)
    assert found.broken[0].difference.high < 0


def test_the_verdict_is_the_largest_and_the_earliest_is_named_too() -> None:
    found = ladder(0.6, 0.5, 0.5, 0.2, 0.2)
    assert [step.rung for step in found.broken] == ["exported", "states"]
    record = found.as_dict()
    assert (record["largest"], record["earliest"]) == ("states", "exported")


def test_a_rung_that_was_not_climbed_is_stepped_over() -> None:
    found = ladder(None, 0.5, None, 0.3, None)
    assert [(step.above, step.rung) for step in found.steps] == [("exported", "states")]
    assert [rung["skipped"] for rung in found.as_dict()["rungs"]] == ["no engine", None, "no engine", None, "no engine"]


def test_a_gain_is_not_broken() -> None:
    assert ladder(0.3, 0.5, 0.5, 0.5, 0.5).broken == ()


def test_a_loss_below_the_threshold_is_sound_even_if_it_is_sure() -> None:
    def lost(one: int) -> tuple[SpecCounters, ...]:
        return tuple(SpecCounters(1000, 1000, (500 - one,)) for _ in PROMPTS)

    rungs = [Rung("trained", "", lost(0)), Rung("exported", "", lost(10)), Rung("responses", "", lost(50))]
    found = climb(rungs, PROMPTS, BOOTSTRAP)
    assert [step.verdict for step in found.steps] == ["sound", "broken"]  # 0.01 and 0.04 of tau, each in every prompt
    assert found.steps[0].p_holm < 0.05


def test_few_prompts_cannot_tell() -> None:
    prompts = PROMPTS[:4]
    rungs = [
        Rung("trained", "", counted(0.4, 0, steps=5, prompts=4)),
        Rung("served", "", counted(0.4, 1, steps=5, prompts=4)),
    ]
    (step,) = climb(rungs, prompts, BOOTSTRAP).steps
    assert step.verdict == "cannot tell"
    assert step.prompts_needed is not None
    assert step.prompts_needed > 4


def test_the_threshold() -> None:
    assert loss_that_counts(1.2) == 0.02
    assert loss_that_counts(3.0) == pytest.approx(0.1)


def test_no_rung_at_all_says_why() -> None:
    with pytest.raises(EagleError, match="trained: no engine"):
        ladder(None, None, None, None, None)


def test_false_alarms_are_rare() -> None:
    """Rungs whose counters differ by chance alone: at most one ladder in twenty may be called broken."""
    alarms = 0
    for seed in range(60):
        found = ladder(0.3, 0.3, 0.3, 0.3, 0.3, seeds=[seed * 5 + i for i in range(5)])
        alarms += bool(found.broken)
    assert alarms <= 6


def test_offset_and_states_apart() -> None:
    """Counters by hand: the offset costs 0.2, the states 0.1, and both together 0.3: no interaction."""

    def tau(value: float) -> list[SpecCounters]:
        return [SpecCounters(100, 100, (round(100 * (value - 1)) + (i % 3 - 1),)) for i in range(48)]

    found = two_by_two([tau(1.6), tau(1.4), tau(1.5), tau(1.3)], PROMPTS, (2, 14, 26), (3, 15, 27), False, BOOTSTRAP)
    assert found.offset.difference.value == pytest.approx(-0.2)
    assert found.states.difference.value == pytest.approx(-0.1)
    assert found.interaction.difference.value == pytest.approx(0, abs=1e-12)
    assert found.p_holm[0] < 0.05
    assert found.p_holm[1] < 0.05
    assert found.p_holm[2] > 0.05
    both = two_by_two([tau(1.6), tau(1.4), tau(1.5), tau(1.4)], PROMPTS, (2, 14, 26), (3, 15, 27), False, BOOTSTRAP)
    assert both.interaction.difference.value == pytest.approx(0.1)


def test_a_weak_drafter_is_told_from_one_that_lacks_text() -> None:
    found = ladder(0.2, 0.2, 0.2, 0.2, 0.2)  # tau about 1.25

    def named(break_even: float | None, gap: Interval | None) -> list[str]:
        return [c.kind for c in causes(Evidence(found, (1, 2), (1, 2), break_even=break_even, gap=gap))]

    learned_by_heart = Interval(-0.5, -0.6, -0.4)
    assert named(None, learned_by_heart) == []  # nobody knows what a step costs
    assert named(1.1, learned_by_heart) == []  # it pays
    assert named(1.6, None) == ["weak_drafter"]
    assert named(1.6, Interval(-0.1, -0.2, -0.05)) == ["weak_drafter"]
    assert named(1.6, learned_by_heart) == ["overfit"]
