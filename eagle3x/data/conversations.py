r"""From conversations to token ids and loss masks, by the target's own chat template.

A loss mask is true exactly for the tokens that the assistant writes: its text and the stop token after it, neither the
header before it nor the newline that a template puts behind it. For ChatML ('·' false, '^' true):

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
    ·······················································^^^^^^^^^^^^^^^^··

No template's markup is known here. The text of a turn is what the template adds to the header that the target is asked
with, unless the template marks the assistant's text itself (`{% generation %}`); that it is the answer is verified for
every sample. Templates that rewrite earlier turns when more follow (they drop their reasoning, most often) have no one
text of a conversation: there each answer is a sample of its own, after the history as the target sees it at that turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from eagle3x.data.chat_template import ChatTemplate
from eagle3x.data.turns import turn_id
from eagle3x.types import Completion, EagleError, Message, Prompt, Response

SHOWN_BEFORE = 12
"""Characters before the place where two renderings part, in messages."""


def prompt_tokens(prompt: Prompt, template: ChatTemplate) -> tuple[int, ...]:
    """The ids that an engine is asked with: the conversation and the header of the answer."""
    text = template.text(prompt.messages, prompt.id, header=True)
    return tuple(template.tokenizer(text, add_special_tokens=False)["input_ids"])


def given(prompt: Prompt, template: ChatTemplate, max_tokens: int, stop_ids: Collection[int]) -> list[Response]:
    """A conversation whose answers are labels as they stand, all turns of them.

    One sample, or one per answer (ids by `turn_id`) where the template rewrites earlier turns. `prompt_tokens` reaches
    to the first label, `response_tokens` from there to the last one, with the user's turns in between (their mask is
    false). What the template puts behind the last label is left out; what is beyond `max_tokens` is cut and counted,
    so that a sample cut before its first label has an empty mask.

    Raises:
        EagleError: the assistant's text cannot be found in the template's output with certainty.
    """
    samples = assistant_tokens(prompt.messages, template, stop_ids, prompt.id)
    responses: list[Response] = []
    for turn, (token_ids, mask) in enumerate(samples, 1):
        whole = len(mask) - mask[::-1].index(True)
        kept = min(whole, max_tokens)
        first = min(mask.index(True), kept)
        responses.append(
            Response(
                id=turn_id(prompt.id, turn),
                category=prompt.category,
                split=prompt.split,
                token_ids=tuple(token_ids[:kept]),
                loss_mask=tuple(mask[:kept]),
                prompt_tokens=first,
                response_tokens=kept - first,
                finish="given",
                cut_tokens=whole - kept,
            )
        )
    return responses


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
    messages: Sequence[Message], template: ChatTemplate, stop_ids: Collection[int], name: str
) -> list[tuple[list[int], list[bool]]]:
    """Token ids up to the last answer, and which of them the assistant writes. `name` is for messages.

    One pair for the whole conversation, or one per answer where the template rewrites earlier turns.

    Special tokens that stand literally in a text are read as special, as inference servers read them. They never begin
    or end a span: spans are found by characters of the turns. In an answer they are refused, for the target would have
    stopped there.

    Raises:
        EagleError: no assistant turn, a tokenizer without offsets, or spans that cannot be verified.
    """
    ends = [i + 1 for i, m in enumerate(messages) if m.role == "assistant"]
    if not ends:
        raise EagleError(f"{name}: no assistant turn, so nothing in it can be a label")
    if not getattr(template.tokenizer, "is_fast", False):
        raise EagleError(
            f"{type(template.tokenizer).__name__} gives no character offsets, so given answers cannot be masked;"
            " use a target with a fast tokenizer (tokenizer.json), or data.responses=regenerate"
        )
    texts = [template.text(messages[:end], name) for end in ends]
    if all(longer.startswith(shorter) for shorter, longer in pairwise(texts)):
        return [_labelled(messages[: ends[-1]], texts, template, stop_ids, name)]
    return [_labelled(messages[:end], [text], template, stop_ids, name) for end, text in zip(ends, texts, strict=True)]


def _labelled(
    messages: Sequence[Message], turns: Sequence[str], template: ChatTemplate, stop_ids: Collection[int], name: str
) -> tuple[list[int], list[bool]]:
    """The last answers of `messages` as labels: as many as `turns`, the renderings that end with each of them."""
    text = turns[-1]
    encoding = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    answers = [i for i, m in enumerate(messages) if m.role == "assistant"][-len(turns) :]
    if template.marks_answers:
        regions = _marked_regions(messages, template, token_ids, name)[-len(turns) :]
    else:
        regions = [_region(messages, i, turn, template, offsets, name) for i, turn in zip(answers, turns, strict=True)]
    mask = [False] * len(token_ids)
    for region, i in zip(regions, answers, strict=True):
        for t in _up_to_stop(region, messages[i], token_ids, offsets, text, stop_ids, name):
            mask[t] = True
    return token_ids, mask


def _region(
    messages: Sequence[Message],
    answer: int,
    turn: str,
    template: ChatTemplate,
    offsets: Sequence[tuple[int, int]],
    name: str,
) -> list[int]:
    """The tokens between the header of the answer and the end of its turn.

    A token that stands half in the header belongs to neither: it is left out.
    """
    head = template.text(messages[:answer], name, header=True)
    if not turn.startswith(head):
        same = next((n for n, (a, b) in enumerate(zip(head, turn, strict=False)) if a != b), min(len(head), len(turn)))
        same = max(0, same - SHOWN_BEFORE)
        raise EagleError(
            f"{name}: the target is asked for turn {answer + 1} with {_shorten(head[same:])}, where the chat template"
            f" writes {_shorten(turn[same:])} when the answer is there; choose the same form of both by"
            " data.chat_template_kwargs (see the template), or use data.responses=regenerate"
        )
    return [t for t, (a, b) in enumerate(offsets) if len(head) <= a and b <= len(turn)]


def _marked_regions(
    messages: Sequence[Message], template: ChatTemplate, token_ids: Sequence[int], name: str
) -> list[list[int]]:
    """Per assistant turn the tokens that the template itself marks by `{% generation %}`."""
    marked_ids, marks = template.marked(messages)
    if marked_ids != list(token_ids):
        raise EagleError(f"{name}: the tokenizer gives other ids for the marked template than for its text")
    regions: list[list[int]] = []
    before = 0
    for t, flag in enumerate(marks):
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
    if _squeezed(written) != _squeezed(message.content):
        more = (
            ". What the template writes before an answer must be in the header that the target is asked with: choose"
            " that by data.chat_template_kwargs (such as enable_thinking=false), or use data.responses=regenerate"
            if _squeezed(written).endswith(_squeezed(message.content))
            else "; an answer must not hold a stop token, and a template must not change it"
        )
        raise EagleError(
            f"{name}: the template's text of an answer is {_shorten(written)}, the answer is"
            f" {_shorten(message.content)}{more}"
        )
    return region[: stop + 1]


def _squeezed(text: str) -> str:
    """Without white space, which templates trim and set around reasoning as the target writes it."""
    return "".join(text.split())


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:60]}...{text[-50:]}")
