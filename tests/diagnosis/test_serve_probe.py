"""The serve probe on counters made by hand."""

from __future__ import annotations

import json
import random

import pytest

from eagle3x.diagnosis.serve_probe import ServeVerdict, candidates, serve_verdict
from eagle3x.types import SpecCounters

PREDICTED, EARLY, LATE, DEFAULT = (2, 14, 26), (1, 13, 25), (3, 15, 27), (2, 15, 27)


def counted(seed: int, requests: int = 16, rate: float = 0.5) -> list[SpecCounters]:
    """Some counters of a chain of 3, different for each seed: V falls as more is accepted."""
    rng = random.Random(seed)
    rows = []
    for _ in range(requests):
        out, steps, at = 0, 0, [0, 0, 0]
        while out < 40:
            accepted = 0
            while accepted < 3 and rng.random() < rate:
                accepted += 1
            for i in range(accepted):
                at[i] += 1
            steps, out = steps + 1, out + accepted + 1
        rows.append(SpecCounters(steps, 3 * steps, (at[0], at[1], at[2])))
    return rows


def nudged(rows: list[SpecCounters], *indices: int) -> list[SpecCounters]:
    """One more accepted draft at position 1 in the named requests."""
    return [
        SpecCounters(r.verify_steps + 1, r.drafted + 3, (r.accepted_at[0] + 1, *r.accepted_at[1:]))
        if i in indices
        else r
        for i, r in enumerate(rows)
    ]


def judged(
    served: list[SpecCounters],
    replayed: dict[tuple[int, ...], list[SpecCounters]],
    predicted: tuple[int, ...],
    exact: bool = True,
) -> ServeVerdict:
    """Each request a prompt of its own."""
    return serve_verdict(served, replayed, predicted, [f"p{i}" for i in range(len(served))], exact)


REPLAYED = {PREDICTED: counted(1), EARLY: counted(2), LATE: counted(3), DEFAULT: counted(4)}


def test_candidates() -> None:
    assert candidates((2, 14, 26), 30) == [PREDICTED, EARLY, LATE, DEFAULT]
    assert candidates((2, 15, 27), 30) == [DEFAULT, (1, 14, 26), (3, 16, 28)]
    assert candidates((0, 14, 30), 30) == [(0, 14, 30), (2, 15, 27)]
    assert candidates((3, 5), 30) == [(3, 5), (2, 4), (4, 6)]
    assert candidates((0,), 2) == [(0,), (1,)]


def test_matched() -> None:
    verdict = judged(REPLAYED[PREDICTED], REPLAYED, PREDICTED)
    assert verdict.matched
    assert verdict.fed == PREDICTED
    assert verdict.fits[0].identical == 16
    assert verdict.fits[0].paired_diff.value == 0
    assert "matched, the server feeds [2, 14, 26]" in verdict.describe()
    assert json.loads(json.dumps(verdict.as_dict()))["fed"] == [2, 14, 26]


@pytest.mark.parametrize("fed", [EARLY, LATE, DEFAULT])
def test_wrong(fed: tuple[int, ...]) -> None:
    verdict = judged(REPLAYED[fed], REPLAYED, PREDICTED)
    assert verdict.verdict == "wrong"
    assert verdict.fed == fed
    assert f"those of {list(fed)}" in verdict.sentence
    if fed == LATE:
        assert "each off by +1" in verdict.sentence


def test_one_request_in_fifty_may_differ() -> None:
    """98 % of 50 is 49."""
    replayed = {PREDICTED: counted(1, 50), LATE: counted(3, 50)}
    assert judged(nudged(replayed[PREDICTED], 7), replayed, PREDICTED).matched
    two = judged(nudged(replayed[PREDICTED], 7, 8), replayed, PREDICTED)
    assert two.verdict == "cannot tell"
    assert "explain the counters best, but only 48 of 50" in two.sentence
    assert two.prompts_needed is None


def test_candidates_that_replay_alike() -> None:
    """Nothing differs in 16 requests: one in 17 may, so 6 that do need 6 * 17 prompts."""
    verdict = judged(REPLAYED[PREDICTED], {PREDICTED: counted(1), LATE: counted(1)}, PREDICTED)
    assert (verdict.verdict, verdict.fed, verdict.prompts_needed) == ("cannot tell", None, 102)
    assert "[2, 14, 26] and [3, 15, 27] replay alike; at least 102 prompts" in verdict.sentence


def test_one_request_that_differs_is_enough_in_float32() -> None:
    """15 of 16 is less than 98 %."""
    replayed = {PREDICTED: counted(1), LATE: nudged(counted(1), 3)}
    assert judged(replayed[PREDICTED], replayed, PREDICTED).matched
    assert judged(replayed[LATE], replayed, PREDICTED).fed == LATE


def test_bfloat16_needs_a_sign_test() -> None:
    """2 of 16 requests tell: 6 need 48 prompts. 6 of 16 tell, all for the predicted: p = 2 / 64."""
    base = counted(1)
    few = judged(base, {PREDICTED: base, LATE: nudged(base, 3, 4)}, PREDICTED, exact=False)
    assert (few.verdict, few.prompts_needed) == ("cannot tell", 48)
    enough = judged(base, {PREDICTED: base, LATE: nudged(base, *range(6))}, PREDICTED, exact=False)
    assert enough.matched
    assert enough.fits[1].p_value == 2 / 64
    other = judged(base, {PREDICTED: nudged(base, *range(6)), LATE: base}, PREDICTED, exact=False)
    assert (other.verdict, other.fed) == ("wrong", LATE)


def test_two_turns_of_a_conversation_tell_once() -> None:
    """8 conversations of two turns. 6 turns of 3 conversations favour the predicted: p = 2 / 8, and 6 of 3/8 are 16."""
    base = counted(1)
    turns = [f"talk-{i // 2}{'#2' if i % 2 else ''}" for i in range(16)]
    found = serve_verdict(base, {PREDICTED: base, LATE: nudged(base, *range(6))}, PREDICTED, turns, exact=False)
    assert (found.verdict, found.prompts_needed) == ("cannot tell", 16)
    assert (found.fits[1].informative, found.fits[1].p_value) == (3, 2 / 8)


def test_bfloat16_names_only_what_is_open() -> None:
    """One candidate is excluded, another is not."""
    base = counted(1)
    replayed = {PREDICTED: base, EARLY: nudged(base, *range(8)), LATE: nudged(base, 3)}
    verdict = judged(base, replayed, PREDICTED, exact=False)
    assert "[2, 14, 26] and [3, 15, 27] replay alike; at least 96 prompts" in verdict.sentence


def test_bfloat16_noise_on_both_sides() -> None:
    """Served differs from every replay; it is the replay at LATE with a nudge in each request."""
    served = nudged(REPLAYED[LATE], *range(16))
    noisy = judged(served, REPLAYED, PREDICTED, exact=False)
    assert noisy.verdict == "wrong"
    assert noisy.fed == LATE
    assert judged(served, REPLAYED, LATE, exact=False).matched


def test_default_that_is_also_one_late() -> None:
    """Two wrong candidates may explain the counters; the predicted does not, which is what matters."""
    replayed = {PREDICTED: counted(1), LATE: counted(3), DEFAULT: counted(3)}
    verdict: ServeVerdict = judged(counted(3), replayed, PREDICTED)
    assert verdict.verdict == "wrong"
    assert verdict.fed in (LATE, DEFAULT)


def test_needs_something_to_compare() -> None:
    with pytest.raises(ValueError, match="another candidate"):
        judged(counted(1), {PREDICTED: counted(1)}, PREDICTED)
    with pytest.raises(ValueError, match="predicted boundaries"):
        judged(counted(1), {LATE: counted(1), EARLY: counted(2)}, PREDICTED)
