"""Puts the states that SGLang wrote, forward by forward, together again: sample by sample.

A forward holds rows of many requests, and a long request has rows in many forwards (chunked prefill). The files' layout
is in `eagle3x.engines.inside.sglang_capture.order`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3x.engines.inside.sglang_capture.order import AUX, LAST, PATTERN, ROWS, TOKENS
from eagle3x.types import EagleError, HiddenStates, TokenSample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Pieces:
    """What is there of a sample: first position of a piece -> its tensors."""

    sample: TokenSample
    found: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    tokens: int = 0

    def add(self, start: int, tensors: dict[str, Tensor]) -> None:
        length = len(tensors[TOKENS])
        expected = self.sample.token_ids[start : start + length]
        if tuple(tensors[TOKENS].tolist()) != expected:
            raise EagleError(f"{self.sample.id}: tokens {start} to {start + length} are not those of the sample")
        ends = {other: other + len(piece[TOKENS]) for other, piece in self.found.items()}
        if self.complete or any(start < end and other < start + length for other, end in ends.items()):
            raise EagleError(f"{self.sample.id}: SGLang wrote states of tokens {start} to {start + length} twice")
        self.found[start] = tensors
        self.tokens += length

    @property
    def complete(self) -> bool:
        return self.tokens == len(self.sample.token_ids)

    def joined(self) -> HiddenStates:
        import torch

        order = sorted(self.found)
        aux, last = (torch.cat([self.found[start][name] for start in order]) for name in (AUX, LAST))
        return HiddenStates(self.sample.id, self.sample.token_ids, aux, last, "post_norm")


class StatesReader:
    """The states of `samples`, which SGLang writes into `folder` while they are read.

    prefix: what a request's id has before its sample's.
    """

    def __init__(self, folder: Path, prefix: str, samples: Sequence[TokenSample]) -> None:
        self._folder = folder
        self._given = {f"{prefix}{sample.id}": _Pieces(sample) for sample in samples}

    def written(self) -> Iterator[HiddenStates]:
        """Those that became complete since the last call; files that were read are removed.

        Raises:
            EagleError: a token with two states, or other tokens than those of the sample: a request that was restarted.
        """
        for file in sorted(self._folder.glob(PATTERN)):
            rows, tensors = _load(file)
            file.unlink()  # what is mapped stays until it is no longer used
            first = 0
            for rid, start, length in rows:
                if rid not in self._given:
                    raise EagleError(f"{file.name} has states of request {rid}, which was not asked for")
                pieces, piece = self._given[rid], {name: t[first : first + length] for name, t in tensors.items()}
                first += length
                # A prefill that shares its forward with decoding has rows of tokens that SGLang wrote itself.
                if start >= len(pieces.sample.token_ids):
                    continue
                pieces.add(start, piece)
                if pieces.complete:
                    yield pieces.joined()
                    pieces.found.clear()

    def finish(self) -> None:
        """Every sample has been answered, so all states must have been there.

        Raises:
            EagleError: tokens without states: a prefix cache, or a model class that SGLang does not capture.
        """
        if lacking := [pieces for pieces in self._given.values() if not pieces.complete]:
            missing = lacking[0]
            raise EagleError(
                f"SGLang wrote no states for {len(lacking)} of {len(self._given)} samples, among them"
                f" {missing.sample.id} with {missing.tokens} of {len(missing.sample.token_ids)} tokens: its model class"
                " does not capture, or a prefix cache is on (its log says which models it could not load)"
            )


def read_states(folder: Path, prefix: str, samples: Sequence[TokenSample]) -> Iterator[HiddenStates]:
    """The states of samples that have all been answered, in the order in which they became complete.

    Raises:
        EagleError: as `StatesReader`.
    """
    reader = StatesReader(folder, prefix, samples)
    yield from reader.written()
    reader.finish()


def _load(file: Path) -> tuple[list[tuple[str, int, int]], dict[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        rows = json.loads(content.metadata()[ROWS])
        return rows, {name: content.get_tensor(name) for name in (AUX, LAST, TOKENS)}
