"""The target's chat template, with the values that the config gives it. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3x.types import EagleError, Message

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def refuse_unread(template: str, kwargs: Mapping[str, Any]) -> None:
    """EagleError for a value that the template never reads: Jinja would take it in silence.

    A template can only read a variable whose name is written in it.
    """
    unread = [name for name in kwargs if re.search(rf"\b{re.escape(name)}\b", template) is None]
    if unread:
        raise EagleError(
            f"data.chat_template_kwargs: the target's chat template has no {' and no '.join(unread)}; take it out, or"
            " spell it as the template does"
        )


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations. Raises EagleError for values that the template does not read."""

    tokenizer: Any
    kwargs: Mapping[str, Any]
    """Passed to every rendering, such as enable_thinking."""

    def __post_init__(self) -> None:
        if self.kwargs:
            refuse_unread(self.tokenizer.get_chat_template(), self.kwargs)

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks what the assistant writes (`{% generation %}`)."""
        return GENERATION.search(self.tokenizer.get_chat_template()) is not None

    def text(self, messages: Sequence[Message], name: str, header: bool = False) -> str:
        """The rendered conversation, with the header of an answer if asked. `name` is for messages.

        Raises:
            EagleError: the template refuses the conversation.
        """
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                _plain(messages), tokenize=False, add_generation_prompt=header, **self.kwargs
            )
        except (TemplateError, ValueError, TypeError) as e:
            raise EagleError(f"{name}: the chat template refuses this conversation: {e}") from e

    def marked(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Token ids, and 1 for each that the template marks as the assistant's."""
        found = self.tokenizer.apply_chat_template(
            _plain(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self.kwargs
        )
        return list(found["input_ids"]), list(found["assistant_masks"])


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]
