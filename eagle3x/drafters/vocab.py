"""The draft vocabulary: which of the target's tokens the drafter can say, by their frequency in the responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3x.types import EagleError


@dataclass(frozen=True)
class DraftVocabulary:
    """target_ids: ascending ids of the target's vocabulary [D]; its size V."""

    target_ids: tuple[int, ...]
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if list(ids) != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise ValueError("a draft vocabulary is ascending, without repeats, and within the target's")

    def d2t(self) -> Tensor:
        """Offsets [D]: target id = i + d2t[i]."""
        return torch.tensor(self.target_ids) - torch.arange(len(self.target_ids))

    def t2d(self) -> Tensor:
        """Whether each target id is in the draft vocabulary [V]."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[torch.tensor(self.target_ids)] = True
        return mask

    def coverage(self, token_ids: Iterable[int]) -> float:
        """Share of these tokens that the drafter can say; 0 tokens are an error."""
        known = set(self.target_ids)
        hits = [token in known for token in token_ids]
        if not hits:
            raise ValueError("coverage of no tokens")
        return sum(hits) / len(hits)


def build(
    responses: Iterable[int], prompts: Iterable[int], always: Sequence[int], size: int, vocab_size: int
) -> DraftVocabulary:
    """Choose `size` ids: `always` (stop tokens), then response tokens by frequency, prompt tokens likewise, then ids.

    Low ids fill the rest, since tokenizers trained by merging give them to frequent tokens. Ties: the lower id first.

    Raises:
        EagleError: `size` is more than the target has, or too small for `always`.
    """
    if not len(set(always)) <= size <= vocab_size:
        raise EagleError(f"drafter.draft_vocab_size={size} must be in {len(set(always))}..{vocab_size}")
    chosen: dict[int, None] = dict.fromkeys(always)
    for source in (_by_frequency(responses), _by_frequency(prompts), range(vocab_size)):
        for token in source:
            if len(chosen) == size:
                break
            chosen.setdefault(token)
    return DraftVocabulary(tuple(sorted(chosen)), vocab_size)


def _by_frequency(token_ids: Iterable[int]) -> list[int]:
    counts = Counter(token_ids)
    return sorted(counts, key=lambda token: (-counts[token], token))
