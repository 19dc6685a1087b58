"""Chain drafting with an EAGLE-3 drafter, greedy at every temperature, and the in-process endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from eagle3x.capture import Reader, predicted_boundaries
from eagle3x.drafters.checkpoint import load as load_drafter
from eagle3x.drafters.eagle3 import DraftCache, Eagle3
from eagle3x.engines.transformers_decoding import decode
from eagle3x.engines.transformers_model import TargetModel
from eagle3x.types import Completion, EagleError, Request, SpecCounters

if TYPE_CHECKING:
    from eagle3x.targets import Target


@dataclass(frozen=True)
class ServedDrafter:
    """A loaded drafter, the boundaries that its config makes us feed, and how many tokens it drafts per step (k)."""

    eagle: Eagle3
    boundaries: tuple[int, ...]
    num_speculative_tokens: int

    def start(self, rows: int, slots: int) -> ChainDrafter:
        """Draft for `rows` rows of `slots` positions."""
        return ChainDrafter(self.eagle, self.eagle.new_cache(rows, slots), self.num_speculative_tokens)


class ChainDrafter:
    """The drafter's side of one run of the decode loop. Row p reads the states at p and token p+1."""

    def __init__(self, eagle: Eagle3, cache: DraftCache, num_speculative_tokens: int) -> None:
        self.eagle, self.num_speculative_tokens = eagle, num_speculative_tokens
        self._cache = cache

    def read(
        self, first_row: int, aux_BTA: Tensor, next_ids_BT: Tensor, positions_BT: Tensor, last_B: Tensor
    ) -> Tensor:
        """Read target states [B, T, A*H] with the token after each; returns the drafter's state [B, H] at `last_B`.

        Columns after `last_B` are padding: what they write lies beyond every query until it is written again.
        """
        fused = self.eagle.fuse(aux_BTA)
        state = self.eagle.step(fused, next_ids_BT, positions_BT, self._rows(first_row, len(last_B)))
        return state[torch.arange(len(last_B), device=state.device), last_B]

    def propose(self, state_BH: Tensor, positions_B: Tensor) -> Tensor:
        """k draft tokens [B, k] of rows 0..B-1, from the states that `read` returned for `positions_B`."""
        cache = self._rows(0, len(positions_B))
        drafts: list[Tensor] = []
        for i in range(self.num_speculative_tokens):
            if i > 0:
                positions_B1 = (positions_B + i)[:, None]
                state_BH = self.eagle.step(state_BH[:, None], drafts[-1][:, None], positions_B1, cache)[:, 0]
            drafts.append(self.eagle.to_target_ids(self.eagle.logits(state_BH).argmax(dim=-1)))
        return torch.stack(drafts, dim=1)

    def move(self, source: int, destination: int) -> None:
        """Copy row `source` to row `destination`."""
        for stored in (self._cache.key, self._cache.value):
            stored[destination] = stored[source]

    def _rows(self, first: int, count: int) -> DraftCache:
        """A view: what is written into it is written into the cache."""
        rows = slice(first, first + count)
        return DraftCache(self._cache.key[rows], self._cache.value[rows])


def load_served_drafter(
    directory: Path, target: Target, model: TargetModel, num_speculative_tokens: int
) -> ServedDrafter:
    """The drafter in `directory`, fed with the boundaries that its config names.

    Raises:
        EagleError: a drafter that cannot be loaded, does not fit the target, or names no boundaries.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise EagleError(f"drafter {directory} has no config.json: it must be an exported drafter")
    config = json.loads(file.read_text(encoding="utf-8"))
    boundaries = predicted_boundaries(Reader("transformers"), config, model.num_blocks)
    eagle = load_drafter(directory, target).to(model.device, model.dtype).eval().requires_grad_(False)
    return ServedDrafter(eagle, boundaries, num_speculative_tokens)


class TransformersEndpoint:
    """Serves in this process, at most `concurrency` rows in one batch."""

    counts_past_stop = True
    per_request_counters = True

    def __init__(self, model: TargetModel, target: Target, drafter: ServedDrafter | None) -> None:
        self._model, self._target, self._drafter = model, target, drafter
        self._totals = SpecCounters.zero(drafter.num_speculative_tokens) if drafter is not None else None

    def complete(self, requests: Sequence[Request], concurrency: int) -> Iterator[Completion]:
        """Answer the requests in their order, at most `concurrency` at a time; yields in order of completion.

        Raises:
            EagleError: a request that cannot be answered, before any is.
        """
        return self._counted(decode(self._model, self._target, requests, concurrency, self._drafter))

    def totals(self) -> SpecCounters | None:
        """Counters of all completed requests; None without a drafter."""
        return self._totals

    def flush_prefix_cache(self) -> None:
        """Nothing to forget: every request is computed from its first token."""

    def _counted(self, completions: Iterator[Completion]) -> Iterator[Completion]:
        for completion in completions:
            if self._totals is not None and completion.counters is not None:
                self._totals = self._totals + completion.counters
            yield completion

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drafter = None
