r"""From conversations to token ids and loss masks, by the target's own chat template.

A loss mask is true exactly for the tokens that the assistant writes: its text and the stop token after it, neither the
header before it nor the newline that a template puts behind it. For ChatML ('·' false, '^' true):

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
    ·······················································^^^^^^^^^^^^^^^^··

No template's markup is known here. The text of a turn is what the template adds to the conversation before it, and that
this is so (each conversation renders to a beginning of the longer one) is verified for every sample: a template that
rewrites earlier turns is refused, unless it marks the assistant's text itself (`{% generation %}`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from eagle3x.types import Completion, EagleError, Message, Prompt, Response

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def prompt_tokens(prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
    """The ids that an engine is asked with: the conversation and the header of the answer."""
    text = _render(prompt.messages, tokenizer, prompt.id, header=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def given(prompt: Prompt, tokenizer: Any, max_tokens: int, stop_ids: Collection[int]) -> Response:
    """A conversation whose answers are labels as they stand, all turns of them.

    `prompt_tokens` reaches to the first label, `response_tokens` from there to the last one, with the user's turns in
    between (their mask is false). What the template puts behind the last label is left out; what is beyond `max_tokens`
    is cut and counted, so that a sample cut before its first label has an empty mask.

    Raises:
        EagleError: the assistant's text cannot be found in the template's output with certainty.
    """
    token_ids, mask = assistant_tokens(prompt.messages, tokenizer, stop_ids, prompt.id)
    whole = len(mask) - mask[::-1].index(True)
    kept = min(whole, max_tokens)
    first = min(mask.index(True), kept)
    return Response(
        id=prompt.id,
        category=prompt.category,
        split=prompt.split,
        token_ids=tuple(token_ids[:kept]),
        loss_mask=tuple(mask[:kept]),
        prompt_tokens=first,
        response_tokens=kept - first,
        finish="given",
        cut_tokens=whole - kept,
    )


def regenerated(
    prompt: Prompt, prompt_ids: Sequence[int], completion: Completion, continuation: Sequence[int] = ()
) -> Response:
    """What the target wrote to `prompt_ids` up to its stop (the labels), then its text past the stop."""
    written = len(completion.token_ids)
    return Response(
        id=prompt.id,
        category=prompt.category,
        split=prompt.split,
        token_ids=(*prompt_ids, *completion.token_ids, *continuation),
        loss_mask=(False,) * len(prompt_ids) + (True,) * written + (False,) * len(continuation),
        prompt_tokens=len(prompt_ids),
        response_tokens=written,
        finish=completion.finish,
    )


def assistant_tokens(
    messages: Sequence[Message], tokenizer: Any, stop_ids: Collection[int], name: str
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation, and which of them the assistant writes. `name` is for messages.

    Special tokens that stand literally in a text are read as special, as inference servers read them. They never begin
    or end a span: spans are found by characters of the turns. In an answer they are refused, for the target would have
    stopped there.

    Raises:
        EagleError: no assistant turn, a tokenizer without offsets, or spans that cannot be verified.
    """
    if not any(m.role == "assistant" for m in messages):
        raise EagleError(f"{name}: no assistant turn, so nothing in it can be a label")
    if not getattr(tokenizer, "is_fast", False):
        raise EagleError(
            f"{type(tokenizer).__name__} gives no character offsets, so given answers cannot be masked;"
            " use a target with a fast tokenizer (tokenizer.json), or data.responses=regenerate"
        )
    text = _render(messages, tokenizer, name)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    if GENERATION.search(tokenizer.get_chat_template()):
        regions = _marked_regions(messages, tokenizer, token_ids, name)
    else:
        regions = _turn_regions(messages, tokenizer, text, offsets, name)
    mask = [False] * len(token_ids)
    for region, message in zip(regions, (m for m in messages if m.role == "assistant"), strict=True):
        for i in _up_to_stop(region, message, token_ids, offsets, text, stop_ids, name):
            mask[i] = True
    return token_ids, mask


def _turn_regions(
    messages: Sequence[Message], tokenizer: Any, text: str, offsets: Sequence[tuple[int, int]], name: str
) -> list[list[int]]:
    """Per assistant turn the tokens between the header of the answer and the end of the turn.

    A token that stands half in the header belongs to neither: it is left out.
    """
    regions: list[list[int]] = []
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        head = _render(messages[:i], tokenizer, name, header=True)
        turn = _render(messages[: i + 1], tokenizer, name)
        if not (text.startswith(turn) and turn.startswith(head)):
            raise EagleError(
                f"{name}: the chat template writes turn {i + 1} in another way when more turns follow, so the"
                " assistant's text cannot be told from the rest; use a template with {% generation %} marks, or"
                " data.responses=regenerate"
            )
        regions.append([t for t, (a, b) in enumerate(offsets) if len(head) <= a and b <= len(turn)])
    return regions


def _marked_regions(
    messages: Sequence[Message], tokenizer: Any, token_ids: Sequence[int], name: str
) -> list[list[int]]:
    """Per assistant turn the tokens that the template itself marks by `{% generation %}`."""
    marked = tokenizer.apply_chat_template(
        _plain(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    if list(marked["input_ids"]) != list(token_ids):
        raise EagleError(f"{name}: the tokenizer gives other ids for the marked template than for its text")
    regions: list[list[int]] = []
    before = 0
    for t, flag in enumerate(marked["assistant_masks"]):
        if flag and not before:
            regions.append([])
        if flag:
            regions[-1].append(t)
        before = flag
    turns = sum(m.role == "assistant" for m in messages)
    if len(regions) != turns:
        raise EagleError(f"{name}: the chat template marks {len(regions)} spans of {turns} assistant turns")
    return regions


def _up_to_stop(
    region: Sequence[int],
    message: Message,
    token_ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    text: str,
    stop_ids: Collection[int],
    name: str,
) -> Sequence[int]:
    """The tokens of `region` up to its stop token, once it is sure that they are the message and nothing else."""
    stop = next((n for n, t in enumerate(region) if token_ids[t] in stop_ids), None)
    if stop is None:
        raise EagleError(
            f"{name}: the chat template ends no answer with one of the target's stop tokens {sorted(stop_ids)};"
            " correct the template or eos_token_id in generation_config.json"
        )
    written = text[offsets[region[0]][0] : offsets[region[stop]][0]]
    if written.strip() != message.content.strip():
        raise EagleError(
            f"{name}: the template's text of an answer is {_shorten(written)}, the answer is"
            f" {_shorten(message.content)}; an answer must not hold a stop token, and a template must not change it"
        )
    return region[: stop + 1]


def _render(messages: Sequence[Message], tokenizer: Any, name: str, header: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(_plain(messages), tokenize=False, add_generation_prompt=header)
    except (TemplateError, ValueError, TypeError) as e:
        raise EagleError(f"{name}: the chat template refuses this conversation: {e}") from e


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:60]}...{text[-50:]}")
