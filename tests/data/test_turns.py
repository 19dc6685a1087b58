"""Which samples are turns of one conversation."""

from __future__ import annotations

from eagle3x.data.turns import conversations, turn_id


def test_turns_are_named_after_the_first() -> None:
    turns = [turn_id("mt-bench-81", turn) for turn in (1, 2, 12)]
    assert turns == ["mt-bench-81", "mt-bench-81#2", "mt-bench-81#12"]
    assert conversations(["x", *turns]) == ["x", "mt-bench-81", "mt-bench-81", "mt-bench-81"]
    assert conversations(turns[::-1]) == ["mt-bench-81"] * 3


def test_ids_of_somebody_that_only_look_like_turns() -> None:
    ids = ["gsm8k#1", "gsm8k#2", "gsm8k#30", "#2", "a#", "a#02"]
    assert conversations([*ids, "a"]) == [*ids, "a"]
