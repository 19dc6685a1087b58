"""Greedy text with the states of more boundaries than a drafter reads: replay, finder and drift take what they need.

Shapes: T tokens of one text, B boundaries captured, H hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from eagle3x.diagnosis.replay import ReplaySample
from eagle3x.types import HiddenStates, LastNorm, TokenSample


class Captures(Protocol):
    """An engine, or a target that is streamed (`streamed_reference.StreamedTarget`)."""

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """See `Engine.capture`."""
        ...


@dataclass(frozen=True)
class Text:
    """What a target wrote at temperature 0: prompt, response with its stop, and how it goes on past that."""

    id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class CapturedText:
    """A text with its states. aux: [T, B*H] at ascending `boundaries`; last: [T, H], before or after the final norm."""

    text: Text
    boundaries: tuple[int, ...]
    aux: Tensor
    last: Tensor
    last_norm: LastNorm

    def at(self, boundary: int) -> Tensor:
        """[T, H]."""
        return self.aux.chunk(len(self.boundaries), dim=-1)[self.boundaries.index(boundary)]

    def columns(self, boundaries: Sequence[int]) -> Tensor:
        """[T, A*H], in this order."""
        return torch.cat([self.at(b) for b in boundaries], dim=-1)

    def only(self, boundaries: Sequence[int]) -> CapturedText:
        """With these ascending boundaries alone."""
        return replace(self, boundaries=tuple(boundaries), aux=self.columns(boundaries))

    def fed(self, boundaries: Sequence[int]) -> ReplaySample:
        """For a drafter that is fed `boundaries`, in this order."""
        text, aux = self.text, self.columns(boundaries)
        return ReplaySample(text.id, torch.tensor(text.token_ids), aux, text.prompt_tokens, text.response_tokens)


def captured(engine: Captures, texts: Sequence[Text], boundaries: Sequence[int]) -> Iterator[CapturedText]:
    """The states of `texts` at ascending `boundaries`, in the order in which the engine hands them over.

    They are copies: what an engine hands over lies in memory that it waits for, and may not be kept.
    """
    by_id = {text.id: text for text in texts}
    for states in engine.capture([TokenSample(t.id, t.token_ids) for t in texts], boundaries):
        aux, last = states.aux.clone(), states.last.clone()
        yield CapturedText(by_id[states.id], tuple(boundaries), aux, last, states.last_norm)
