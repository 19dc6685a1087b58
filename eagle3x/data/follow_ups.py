"""User turns that follow the target's own answers. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle3x.data.response_parts import ResponseParts
from eagle3x.data.turns import turn_id
from eagle3x.types import Message, Prompt


def turn_ids(prompt: Prompt) -> list[str]:
    """The ids of the samples that a prompt and its follow-ups become, in order."""
    return [turn_id(prompt.id, turn) for turn in range(1, len(prompt.follow_ups) + 2)]


def next_turns(asked: Mapping[str, Prompt], turn: int, answers: ResponseParts, tokenizer: Any) -> dict[str, Prompt]:
    """The prompts of turn number `turn`, by the id of their first one: the talk so far, then the next question.

    The answer is the text that a client gets and sends back, without special tokens; what a chat template leaves of it
    (reasoning, say) is the template's choice. A conversation without an answer so far, for want of room, ends.
    """
    open_ones = {first: prompt for first, prompt in asked.items() if prompt.follow_ups}
    written = answers.responses([prompt.id for prompt in open_ones.values()])
    later: dict[str, Prompt] = {}
    for first, prompt in open_ones.items():
        if prompt.id not in written:
            continue
        response = written[prompt.id]
        ids = response.token_ids[response.prompt_tokens : response.prompt_tokens + response.response_tokens]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        said = (*prompt.messages, Message("assistant", text), Message("user", prompt.follow_ups[0]))
        later[first] = replace(prompt, id=turn_id(first, turn), messages=said, follow_ups=prompt.follow_ups[1:])
    return later
