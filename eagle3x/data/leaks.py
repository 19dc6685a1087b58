"""What must not be trained on: what asks the same as a held-out prompt, as messages or as token ids. No torch here."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from eagle3x.types import Prompt

LEAK_WORDS = 8
"""A train prompt with this many words in a row of an eval prompt is a leak; a shorter turn is one if it is the same."""
USER = ("user", "human")
"""How templates that have no token of their own for it begin a user's turn."""

Why = Literal["same_prompt", "leak"]
"""It begins with the whole of a val or eval prompt; or it shares words with a user's turn of an eval prompt."""


def leaking(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> set[str]:
    """Ids of the train prompts one of whose user turns shares `LEAK_WORDS` words in a row with an eval user turn.

    System messages and answers do not count: they may be the same everywhere.
    """
    seen = _seen(evaluation)
    return {p.id for p in train if any(gram in seen for turn in _turns(p) for gram in _grams(_words(turn)))}


class HeldOut:
    """What texts that come as token ids are compared with, before they are trained on.

    What the target did not write in them (the mask is false) is decoded, piece by piece between special tokens, and
    compared like the user turns of a prompt.
    """

    def __init__(self, evaluation: Sequence[Prompt], asked: Iterable[Sequence[int]], tokenizer: Any) -> None:
        """evaluation: the eval prompts. asked: val and eval prompts as an engine was asked with them."""
        self._seen = _seen(evaluation)
        self._asked: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for prompt in asked:
            self._asked[len(prompt)].add(tuple(prompt))
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)

    def why_not(self, tokens: Sequence[int], mask: Sequence[bool]) -> Why | None:
        """Why this text cannot be trained on; None if it can."""
        if any(tuple(tokens[:length]) in prompts for length, prompts in self._asked.items()):
            return "same_prompt"
        for piece in self._pieces(tokens, mask):
            words = _words(self._tokenizer.decode(piece))
            if any(gram in self._seen for gram in _grams(words)):
                return "leak"
            if words[:1] and words[0] in USER and any(gram in self._seen for gram in _grams(words[1:])):
                return "leak"
        return None

    def _pieces(self, tokens: Sequence[int], mask: Sequence[bool]) -> Iterator[list[int]]:
        piece: list[int] = []
        for token, label in zip(tokens, mask, strict=True):
            if not label and token not in self._special:
                piece.append(token)
            elif piece:
                yield piece
                piece = []
        if piece:
            yield piece


def _seen(evaluation: Sequence[Prompt]) -> frozenset[tuple[str, ...]]:
    return frozenset(gram for p in evaluation for turn in _turns(p) for gram in _grams(_words(turn)))


def _turns(prompt: Prompt) -> Iterator[str]:
    yield from (message.content for message in prompt.messages if message.role == "user")
    yield from prompt.follow_ups


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower()) or text.split()


def _grams(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    if words:
        for i in range(max(1, len(words) - LEAK_WORDS + 1)):
            yield tuple(words[i : i + LEAK_WORDS])
