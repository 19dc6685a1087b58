"""Loss masks under templates in the style of those that targets have; labels were marked by hand ⟦like this⟧.

The templates (tests/fixtures/templates) are small texts of our own that do what those do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3x.data.chat_template import ChatTemplate
from eagle3x.data.conversations import assistant_tokens, given, prompt_tokens
from eagle3x.types import EagleError, Message, Prompt

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "templates"
SPECIAL = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
    "<think>", "</think>", "<s>", "</s>", "<User>", "<Assistant>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>",
    "<|im_middle|>",
)  # fmt: skip
STOPS = tuple(SPECIAL.index(token) for token in ("<|eot_id|>", "<|im_end|>", "</s>"))


def template(family: str, **kwargs: Any) -> ChatTemplate:
    """One token per character, and one per special token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*SPECIAL, "\n", *map(chr, range(32, 127))))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=list(SPECIAL))
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return ChatTemplate(tokenizer, kwargs)


def talk(*texts: str) -> tuple[Message, ...]:
    """Turns of user and assistant, the user first."""
    return tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))


def drawn(chat: ChatTemplate, *texts: str) -> list[str]:
    """Each sample as text, its labels between brackets."""
    samples = []
    for token_ids, mask in assistant_tokens(talk(*texts), chat, STOPS, "sample"):
        text, before = "", False
        for token, label in zip(chat.tokenizer.convert_ids_to_tokens(token_ids), mask, strict=True):
            text += "⟦" * (label and not before) + "⟧" * (before and not label) + token
            before = label
        samples.append(text + "⟧" * before)
    return samples


def test_llama_3() -> None:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert drawn(template("llama3"), "Hi ", " Yes.", "So?", "No.\n") == [
        "<|begin_of_text|>"
        + header.format("user") + "Hi<|eot_id|>" + header.format("assistant") + "⟦Yes.<|eot_id|>⟧"
        + header.format("user") + "So?<|eot_id|>" + header.format("assistant") + "⟦No.<|eot_id|>⟧"
    ]  # fmt: skip


def test_qwen3_reasoning_is_a_label_in_the_turn_that_wrote_it_and_gone_from_the_history() -> None:
    answers = "<think>\nHm.\n</think>\n\nYes.", "<think>Oh.</think>No."
    assert drawn(template("qwen3"), "Hi", answers[0], "So?", answers[1]) == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nHm.\n</think>\n\nYes.<|im_end|>⟧\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nOh.\n</think>\n\nNo.<|im_end|>⟧\n",
    ]


def test_qwen3_without_thinking_the_empty_block_is_the_headers() -> None:
    assert drawn(template("qwen3", enable_thinking=False), "Hi", "Yes.", "So?", "No.") == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Yes.<|im_end|>⟧\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦No.<|im_end|>⟧\n",
    ]


def test_qwen3_an_empty_block_that_the_answer_has_not_is_no_label() -> None:
    with pytest.raises(EagleError, match=r"(?s)<think>.*Yes.*before an answer.*enable_thinking=false.*regenerate"):
        drawn(template("qwen3"), "Hi", "Yes.")


def test_deepseek_v3_one_sample_for_all_turns() -> None:
    assert drawn(template("deepseek_v3", thinking=False), "Hi", "Yes.", "So?", "No.") == [
        "<s><User>Hi<Assistant></think>⟦Yes.</s>⟧<User>So?<Assistant></think>⟦No.</s>⟧"
    ]


def test_deepseek_v3_asked_to_think_is_not_what_its_template_shows() -> None:
    with pytest.raises(
        EagleError, match=r"asked for turn 2 with '.*sistant><think>', .* writes '.*sistant></think>Yes.</s>'.*_kwargs"
    ):
        drawn(template("deepseek_v3", thinking=True), "Hi", "Yes.")


def test_deepseek_r1_drops_reasoning_so_it_is_no_label() -> None:
    with pytest.raises(
        EagleError, match=r"asked for turn 2 with '.*<think>\\n', .* writes '.*sistant>Yes.</s>'.*regenerate"
    ):
        drawn(template("deepseek_r1"), "Hi", "<think>\nHm.\n</think>Yes.")


def test_kimi_k2() -> None:
    assert drawn(template("kimi_k2"), "Hi", "Yes.", "So?", "No.") == [
        "<|im_system|>system<|im_middle|>You help.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>⟦Yes.<|im_end|>⟧"
        "<|im_user|>user<|im_middle|>So?<|im_end|><|im_assistant|>assistant<|im_middle|>⟦No.<|im_end|>⟧"
    ]


def test_requests_get_the_templates_values_too() -> None:
    prompt = Prompt("p", "c", "eval", talk("Hi"))
    texts = {
        thinking: "".join(chat.tokenizer.convert_ids_to_tokens(prompt_tokens(prompt, chat)))
        for thinking in (True, False)
        for chat in [template("qwen3", enable_thinking=thinking)]
    }
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert texts == {True: asked, False: asked + "<think>\n\n</think>\n\n"}


def test_samples_of_one_conversation_have_ids_and_lengths_of_their_own() -> None:
    prompt = Prompt("p", "c", "train", talk("Hi", "<think>a</think>b", "So?", "<think>c</think>d"))
    first, second = given(prompt, template("qwen3"), 60, STOPS)
    assert (first.id, second.id) == ("p", "p#2")
    # <|im_start|>user\n is 6 tokens, Hi 2, <|im_end|>\n 2, <|im_start|>assistant\n 11; the answer 8 and its stop
    assert (first.prompt_tokens, first.response_tokens, first.cut_tokens) == (21, 9, 0)
    assert (second.prompt_tokens, second.response_tokens, second.cut_tokens) == (
        46,
        9,
        0,
    )  # 21 + b and 2, 6 + 3 + 2 + 11
    assert [r.cut_tokens for r in given(prompt, template("qwen3"), 50, STOPS)] == [0, 5]


def test_a_value_that_the_template_never_reads_is_refused() -> None:
    with pytest.raises(EagleError, match="chat template has no enable_thinkin; take it out"):
        template("qwen3", enable_thinkin=False)
