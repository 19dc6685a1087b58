"""Eval text that comes in as token ids: each way in which it could get past is a case here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eagle3x.data.leaks import HeldOut
from eagle3x.targets import Target
from eagle3x.types import Message, Prompt

LONG = "Explain how a lighthouse keeper measured the height of the tide."
SHORT = "What is a fjord?"
EVALUATION = [
    Prompt("long", "a", "eval", (Message("system", "You are a patient teacher of young children at school."),
                                 Message("user", LONG))),
    Prompt("short", "a", "eval", (Message("user", "Good evening to you"),), (SHORT,)),
]  # fmt: skip
START, END = "<|im_start|>", "<|im_end|>"
CASES: dict[str, tuple[list[tuple[str, bool]], str | None]] = {
    "the prompt as it was asked": (
        [(f"{START}user\n{LONG}{END}\n{START}assistant\n", False), ("By", True)],
        "same_prompt",
    ),
    "under another system message": (
        [(f"{START}system\nBe brief.{END}\n{START}user\n{LONG}{END}\n{START}assistant\n", False), ("By", True)],
        "leak",
    ),
    "within a longer question": ([(f"{START}user\nPlease {LONG.lower()} And why?{END}", False), ("By", True)], "leak"),
    "under a template without special tokens": ([(f"USER: {LONG} ASSISTANT: ", False), ("By", True)], "leak"),
    "a short turn": (
        [(f"{START}system\nBe brief.{END}\n{START}user\n{SHORT}{END}\n{START}assistant\n", False), ("By", True)],
        "leak",
    ),
    "a short turn under a template with a token for users": ([(f"{START}{SHORT}{END}", False), ("By", True)], "leak"),
    "after an answer": (
        [(f"{START}user\nHi{END}", False), (f"Hello{END}", True), (f"{START}user\n{SHORT}{END}", False), ("By", True)],
        "leak",
    ),
    "words of a short turn in a longer one": ([(f"{START}user\n{SHORT} And a bay?{END}", False), ("By", True)], None),
    "an eval prompt's system message": (
        [(f"{START}system\nYou are a patient teacher of young children at school.{END}\n", False),
         (f"{START}user\nWhy?{END}", False), ("By", True)],
        None,
    ),
    "said by the target": ([(f"{START}user\nAsk something{END}", False), (LONG, True)], None),
    "nothing but labels": ([("By", True)], None),
    "nothing": ([], None),
}  # fmt: skip


@pytest.fixture(scope="module")
def encode(tiny_target: Target) -> Callable[[str], list[int]]:
    return lambda text: tiny_target.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("case", CASES)
def test_what_asks_an_eval_question_is_not_trained_on(
    case: str, tiny_target: Target, encode: Callable[[str], list[int]]
) -> None:
    pieces, wanted = CASES[case]
    asked = [encode(f"{START}user\n{LONG}{END}\n{START}assistant\n"), encode("a val prompt")]
    held_out = HeldOut(EVALUATION, asked, tiny_target.tokenizer)
    tokens = [(token, label) for text, label in pieces for token in encode(text)]
    assert held_out.why_not([t for t, _ in tokens], [label for _, label in tokens]) == wanted


def test_a_val_prompt_is_not_trained_on_either(tiny_target: Target, encode: Callable[[str], list[int]]) -> None:
    held_out = HeldOut(EVALUATION, [encode("a val prompt")], tiny_target.tokenizer)
    tokens = encode("a val prompt and its answer")
    assert held_out.why_not(tokens, [i > 12 for i in range(len(tokens))]) == "same_prompt"
