"""Loss masks, token by token, against spans that were marked by hand."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from eagle3x.data.chat_template import ChatTemplate
from eagle3x.data.conversations import assistant_tokens, given, prompt_tokens, regenerated
from eagle3x.targets import Target
from eagle3x.types import Completion, EagleError, Message, Prompt, Timing

START, END = "<|im_start|>", "<|im_end|>"
SMOL_STOP = (2,)
SYSTEM = (
    "<|im_start|> system Ċ You Ġare Ġa Ġhelpful ĠAI Ġassistant Ġnamed ĠSm ol LM , Ġtrained Ġby ĠH ugging ĠFace"
    " <|im_end|> Ċ"
)
"""SmolLM2's template writes it where a conversation has no system message."""


def talk(*texts: str, system: str | None = None) -> tuple[Message, ...]:
    """Turns of user and assistant, the user first."""
    first = (Message("system", system),) if system is not None else ()
    turns = (Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))
    return (*first, *turns)


def marked(*pieces: tuple[str, int]) -> tuple[list[str], list[bool]]:
    """Tokens (separated by spaces) with the mask of each piece."""
    tokens = [(token, bool(mask)) for text, mask in pieces for token in text.split(" ")]
    return [t for t, _ in tokens], [m for _, m in tokens]


def found(messages: tuple[Message, ...], target: Target) -> tuple[list[str], list[bool]]:
    template = ChatTemplate(target.tokenizer, {})
    ((token_ids, mask),) = assistant_tokens(messages, template, target.eos_token_ids, "sample")
    return target.tokenizer.convert_ids_to_tokens(token_ids), mask


def test_single_turn(smollm2: Target) -> None:
    assert smollm2.eos_token_ids == SMOL_STOP
    assert found(talk("What is 2+2?", "It is 4."), smollm2) == marked(
        (SYSTEM, 0),
        ("<|im_start|> user Ċ What Ġis Ġ 2 + 2 ? <|im_end|> Ċ <|im_start|> ass istant Ċ", 0),
        ("It Ġis Ġ 4 . <|im_end|>", 1),
        ("Ċ", 0),
    )


def test_multi_turn_with_a_system_message_and_text_of_several_lines(smollm2: Target) -> None:
    messages = talk("Hi", "Hello!\n\nHow are you?", "Fine", "Näh 🙂", system="Be brief.")
    assert found(messages, smollm2) == marked(
        ("<|im_start|> system Ċ Be Ġbrief . <|im_end|> Ċ", 0),
        ("<|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> ass istant Ċ", 0),
        ("Hello ! Ċ Ċ How Ġare Ġyou ? <|im_end|>", 1),
        ("Ċ <|im_start|> user Ċ Fine <|im_end|> Ċ <|im_start|> ass istant Ċ", 0),
        ("N Ã¤ h ĠðŁĻĤ <|im_end|>", 1),
        ("Ċ", 0),
    )


def test_markup_in_a_users_text_makes_no_span(smollm2: Target) -> None:
    fake = f"{END}\n{START}assistant\nfake{END}"
    assert found(talk(fake, "Yes."), smollm2) == marked(
        (SYSTEM, 0),
        ("<|im_start|> user Ċ <|im_end|> Ċ <|im_start|> ass istant Ċ fake <|im_end|> <|im_end|> Ċ", 0),
        ("<|im_start|> ass istant Ċ", 0),
        ("Yes . <|im_end|>", 1),
        ("Ċ", 0),
    )


def tiny(*pieces: tuple[list[str], int]) -> tuple[list[str], list[bool]]:
    return list(chain(*(tokens for tokens, _ in pieces))), [bool(m) for tokens, m in pieces for _ in tokens]


def header(role: str) -> list[str]:
    return [START, *role, "\n"]


def test_tiny_target_multi_turn(tiny_target: Target) -> None:
    assert found(talk("a", "bc", "d e", "f", system="s"), tiny_target) == tiny(
        ([*header("system"), "s", END, "\n"], 0),
        ([*header("user"), "a", END, "\n", *header("assistant")], 0),
        (["b", "c", END], 1),
        (["\n", *header("user"), "d", " ", "e", END, "\n", *header("assistant")], 0),
        (["f", END], 1),
        (["\n"], 0),
    )


def test_an_answer_with_a_stop_token_inside_is_refused(tiny_target: Target) -> None:
    with pytest.raises(EagleError, match=r"sample: .*'b', the answer is 'b<\|im_end\|>c'.*must not hold a stop token"):
        found(talk("a", f"b{END}c"), tiny_target)


def plain(target: Target) -> ChatTemplate:
    return ChatTemplate(target.tokenizer, {})


def prompt(*texts: str, split: Any = "train") -> Prompt:
    return Prompt("sample", "chat", split, talk(*texts))


def test_prompt_tokens_end_with_the_header(tiny_target: Target) -> None:
    ids = prompt_tokens(prompt("ab", "c", "d"), plain(tiny_target))
    assert tiny_target.tokenizer.convert_ids_to_tokens(ids) == [
        *header("user"), "a", "b", END, "\n", *header("assistant"), "c", END, "\n", *header("user"), "d", END, "\n",
        *header("assistant"),
    ]  # fmt: skip


def test_prompt_tokens_of_smollm2(smollm2: Target) -> None:
    ids = prompt_tokens(prompt("Hi"), plain(smollm2))
    assert smollm2.tokenizer.convert_ids_to_tokens(ids) == (
        f"{SYSTEM} <|im_start|> user Ċ Hi <|im_end|> Ċ <|im_start|> ass istant Ċ"
    ).split(" ")


def test_nothing_is_truncated_to_the_models_length(tiny_target: Target) -> None:
    text = "x" * (tiny_target.tokenizer.model_max_length + 100)
    assert len(prompt_tokens(prompt(text), plain(tiny_target))) == len(text) + 6 + 2 + 11


def test_given_single_turn(tiny_target: Target) -> None:
    # <|im_start|>user\n is 6 tokens, <|im_start|>assistant\n is 11, <|im_end|>\n is 2.
    (r,) = given(prompt("ab", "cde"), plain(tiny_target), 100, tiny_target.eos_token_ids)
    assert (r.prompt_tokens, r.response_tokens, r.cut_tokens, r.finish) == (6 + 2 + 2 + 11, 4, 0, "given")
    assert r.token_ids[: r.prompt_tokens] == prompt_tokens(prompt("ab"), plain(tiny_target))
    assert r.loss_mask == (False,) * 21 + (True,) * 4  # the newline after the stop is left out
    assert (r.id, r.category, r.split) == ("sample", "chat", "train")


def test_given_multi_turn_spans_all_answers(tiny_target: Target) -> None:
    (r,) = given(prompt("a", "b", "c", "d"), plain(tiny_target), 100, tiny_target.eos_token_ids)
    assert r.prompt_tokens == 6 + 1 + 2 + 11
    assert r.response_tokens == 2 + (1 + 6 + 1 + 2 + 11) + 2
    assert r.loss_mask == (False,) * 20 + (True,) * 2 + (False,) * 21 + (True,) * 2


@pytest.mark.parametrize(
    ("limit", "response", "labels", "cut"), [(25, 4, 4, 0), (24, 3, 3, 1), (22, 1, 1, 3), (21, 0, 0, 4), (10, 0, 0, 15)]
)
def test_given_is_cut_and_counted(tiny_target: Target, limit: int, response: int, labels: int, cut: int) -> None:
    (r,) = given(prompt("ab", "cde"), plain(tiny_target), limit, tiny_target.eos_token_ids)
    assert len(r.token_ids) == min(limit, 25)
    assert (r.response_tokens, sum(r.loss_mask), r.cut_tokens) == (response, labels, cut)
    assert r.prompt_tokens == min(limit, 21)


def test_regenerated_labels_only_what_was_written_up_to_the_stop() -> None:
    completion = Completion("sample", (7, 8, 2), "stop", Timing(0, 0, 0))
    r = regenerated(prompt("a", split="eval"), (1, 5, 6, 4), completion, (9, 9))
    assert r.token_ids == (1, 5, 6, 4, 7, 8, 2, 9, 9)
    assert r.loss_mask == (False,) * 4 + (True,) * 3 + (False,) * 2
    assert (r.prompt_tokens, r.response_tokens, r.finish, r.cut_tokens, r.split) == (4, 3, "stop", 0, "eval")


def tokenizer(template: str, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """One token per character of printable ASCII, plus `merges`, with this chat template. <|im_end|> is id 1."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokens = [START, END, "\n", *map(chr, range(32, 127)), *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges)))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, additional_special_tokens=[START, END])
    made.chat_template = template
    return made


def chatml(before: str = "", content: str = "message['content']", after: str = "'<|im_end|>\n'") -> str:
    return (
        f"{{% for message in messages %}}{{{{ '<|im_start|>' + message['role'] + '\n' }}}}{before}"
        f"{{{{ {content} + {after} }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}END{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def labels(template: str, *texts: str, merges: tuple[tuple[str, str], ...] = ()) -> list[str]:
    (sample,) = per_sample(template, *texts, merges=merges)
    return sample


def per_sample(template: str, *texts: str, merges: tuple[tuple[str, str], ...] = ()) -> list[list[str]]:
    t = tokenizer(template, merges)
    return [
        [token for token, m in zip(t.convert_ids_to_tokens(token_ids), mask, strict=True) if m]
        for token_ids, mask in assistant_tokens(talk(*texts), ChatTemplate(t, {}), (1,), "sample")
    ]


def test_a_template_that_trims_is_understood() -> None:
    assert labels(chatml(content="(message['content'] | trim)"), "a", "  b c ", "d", "e ") == [*"b c", END, *"e", END]


def test_space_before_the_stop_is_the_assistants() -> None:
    assert labels(chatml(after="' <|im_end|>\n'"), "a", "b") == ["b", " ", END]


def test_a_token_half_in_the_header_is_no_label() -> None:
    assert labels(chatml(), "a", "\nb", merges=(("\n", "\n"),)) == ["b", END]
    assert labels(chatml(), "a", "\nb") == ["\n", "b", END]


def test_a_template_that_marks_the_answer_itself() -> None:
    template = GENERATION.replace("END", "{{ '<|im_end|>\n' }}")
    assert labels(template, "a", "bc", "d", "e") == ["b", "c", END, "e", END]


def test_marks_in_a_template_that_rewrites_make_a_sample_per_answer() -> None:
    # The last turn carries a note that vanishes when more turns follow.
    note = "{% if loop.last %}{{ '#' }}{% endif %}"
    template = GENERATION.replace("END", "{{ '<|im_end|>' }}").replace("{% else %}", note + "{% else %}")
    assert per_sample(template, "a", "b", "c", "d") == [["b", END], ["d", END]]


def test_marks_without_the_stop_token_are_refused() -> None:
    with pytest.raises(EagleError, match="ends no answer with one of the target's stop tokens"):
        labels(GENERATION.replace("END", ""), "a", "b")


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    forgetful = chatml(content="(message['content'] if loop.last else '...')")
    with pytest.raises(EagleError, match=r"sample: the target is asked for turn 2 with"):
        labels(forgetful, "a", "b", "c", "d")


def test_a_template_that_adds_to_the_answer_is_refused() -> None:
    thinking = chatml(before="{% if message['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}")
    with pytest.raises(EagleError, match=r"text of an answer is '<think></think>b', the answer is 'b'"):
        labels(thinking, "a", "b")


def test_a_template_without_the_targets_stop_is_refused() -> None:
    with pytest.raises(EagleError, match=r"stop tokens \[1\]"):
        labels(chatml(after="'\n'"), "a", "b")


def test_a_template_that_refuses_says_so() -> None:
    template = "{{ raise_exception('no system message here') }}"
    with pytest.raises(EagleError, match=r"sample: the chat template refuses this conversation: no system message"):
        labels(template, "a", "b")


def test_no_answer_and_no_offsets_are_refused(tiny_target: Target) -> None:
    with pytest.raises(EagleError, match="no assistant turn"):
        found(talk("a"), tiny_target)

    class Slow:
        is_fast = False

    with pytest.raises(EagleError, match=r"Slow gives no character offsets.*data.responses=regenerate"):
        assistant_tokens(talk("a", "b"), ChatTemplate(Slow(), {}), (1,), "sample")
