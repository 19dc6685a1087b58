"""The decode loop: prefill, then steps that verify k drafts per row (none without a drafter).

Active rows are always rows 0..n-1 of the caches: when a row finishes, the last one moves into its place and the next
request joins at the end. One loop serves plain and speculative decoding, so both differ in their drafts alone.

A draft is accepted if it is the token that the target chooses there: the most likely one or, at a temperature above 0,
one drawn from the target's distribution p. That is speculative sampling (Leviathan et al. 2023, arXiv:2211.17192,
algorithm 1) of a drafter that drafts its own most likely token x, whose distribution is 1 at x: x is accepted with
probability min(1, p(x) / 1), else the token comes from p without x, renormalised. vLLM (draft_sample_method=greedy) and
SGLang (target-only verification) do so too, so tau means the same. Each output position has a number of its own for
its draw, of the request's seed: text depends neither on drafts nor on what shares the batch.

Legend: B active rows, Q = k+1 tokens fed per row and step, H hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3x.engines.transformers_batches import by_length, right_padded
from eagle3x.engines.transformers_cache import SlotCache
from eagle3x.engines.transformers_choice import greedy, sample
from eagle3x.engines.transformers_model import TargetModel
from eagle3x.types import Completion, EagleError, Finish, Request, SpecCounters, Timing

if TYPE_CHECKING:
    from eagle3x.engines.transformers_speculation import ServedDrafter
    from eagle3x.targets import Target


@dataclass
class Row:
    """A request in flight."""

    request: Request
    start: float
    first_token: float = 0.0
    output: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    verify_steps: int = 0
    accepted_at: list[int] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)
    """Of each output position that may be drawn, past the limit too. Empty at temperature 0."""
    finish: Finish | None = None

    @property
    def last_position(self) -> int:
        """Of the newest token, which no forward has read yet."""
        return len(self.request.prompt_ids) + len(self.output) - 1

    def take(self, ids: Sequence[int], gaps: Sequence[float], eos: frozenset[int]) -> None:
        """Append new tokens up to the stop token or the limit; sets `finish` there."""
        for token, gap in zip(ids, gaps, strict=True):
            self.output.append(token)
            self.gaps.append(gap)
            if token in eos and not self.request.ignore_eos:
                self.finish = "stop"
                return
            if len(self.output) == self.request.max_tokens:
                self.finish = "length"
                return

    def completion(self, num_speculative_tokens: int) -> Completion:
        """The record of a finished request."""
        assert self.finish is not None
        k, end = num_speculative_tokens, time.monotonic()
        counters = SpecCounters(self.verify_steps, self.verify_steps * k, tuple(self.accepted_at)) if k else None
        return Completion(
            self.request.id,
            tuple(self.output),
            self.finish,
            Timing(self.start, self.first_token, end),
            counters,
            cached_tokens=0,
            top2_gaps=tuple(self.gaps) if self.request.temperature == 0 else None,
        )


def decode(
    model: TargetModel, target: Target, requests: Sequence[Request], concurrency: int, drafter: ServedDrafter | None
) -> Iterator[Completion]:
    """Answer the requests in their order, at most `concurrency` at a time; yields in order of completion.

    Raises:
        EagleError: before anything runs, for a request that cannot be answered.
    """
    k = drafter.num_speculative_tokens if drafter is not None else 0
    if concurrency < 1:
        raise EagleError(f"concurrency must be at least 1, not {concurrency}")
    for request in requests:
        _check(request, target, k)
    return Decoding(model, target, requests, concurrency, drafter).run() if requests else iter(())


def _check(request: Request, target: Target, k: int) -> None:
    if not request.prompt_ids:
        raise EagleError(f"request {request.id} has an empty prompt")
    if request.max_tokens < 1:
        raise EagleError(f"request {request.id} asks for {request.max_tokens} tokens; ask for at least 1")
    if request.temperature < 0 or not 0 < request.top_p <= 1:
        raise EagleError(f"request {request.id}: temperature must be at least 0 and top_p in (0, 1]")
    needed = len(request.prompt_ids) + request.max_tokens + k
    if needed > target.max_position_embeddings:
        raise EagleError(
            f"request {request.id} needs {needed} positions ({len(request.prompt_ids)} prompt tokens,"
            f" {request.max_tokens} new ones, {k} drafts); target {target.name} has {target.max_position_embeddings}"
        )


class Decoding:
    """One run of the loop over some requests."""

    def __init__(
        self,
        model: TargetModel,
        target: Target,
        requests: Sequence[Request],
        concurrency: int,
        drafter: ServedDrafter | None,
    ) -> None:
        self.model = model
        self.eos = frozenset(target.eos_token_ids)
        self.k = drafter.num_speculative_tokens if drafter is not None else 0
        self.taps = drafter.boundaries if drafter is not None else ()
        self.waiting = deque(requests)
        self.capacity = min(concurrency, len(requests))
        slots = max(len(r.prompt_ids) + r.max_tokens for r in requests) + self.k
        self.cache = SlotCache(model.num_blocks, self.capacity, slots)
        self.drafter = drafter.start(self.capacity, slots) if drafter is not None else None
        self.rows: list[Row] = []

    @torch.inference_mode()
    def run(self) -> Iterator[Completion]:
        """Completions as requests finish."""
        states: list[Tensor] = []  # the drafter's, of each active row: what its next drafts start from
        while self.waiting or self.rows:
            while self.waiting and len(self.rows) < self.capacity:
                for done in self._admit(states):
                    yield done.completion(self.k)
            if self.rows:
                finished, states = self._step(self._drafts(states))
                for done in finished:
                    yield done.completion(self.k)

    def _admit(self, states: list[Tensor]) -> list[Row]:
        """Prefill as many waiting requests as there is room for; returns those that are already finished."""
        taken = [self.waiting.popleft() for _ in range(min(self.capacity - len(self.rows), len(self.waiting)))]
        start = time.monotonic()
        finished = []
        for batch in by_length([len(r.prompt_ids) for r in taken], self.capacity):
            rows = [Row(taken[i], start, accepted_at=[0] * self.k) for i in batch]
            for row in rows:
                if row.request.temperature > 0:
                    generator = torch.Generator().manual_seed(row.request.seed)
                    drawn = row.request.max_tokens + self.k
                    row.uniforms = torch.rand(drawn, generator=generator, dtype=torch.float64).tolist()
            finished += self._prefill(rows, states)
        return finished

    def _prefill(self, rows: list[Row], states: list[Tensor]) -> list[Row]:
        device, first_row = self.model.device, len(self.rows)
        ids_BT = right_padded([r.request.prompt_ids for r in rows], device)
        positions_BT = torch.arange(ids_BT.shape[1], device=device).expand_as(ids_BT)
        hidden_BTH, tapped = self.model.forward(ids_BT, positions_BT, self.cache, None, self.taps, first_row)
        each = torch.arange(len(rows), device=device)
        last_B = torch.tensor([len(r.request.prompt_ids) - 1 for r in rows], device=device)
        new_B1, gaps_B1 = self._choose(self.model.logits(hidden_BTH[each, last_B])[:, None], rows)
        new, gaps, now = new_B1.tolist(), gaps_B1.tolist(), time.monotonic()
        for row, ids, gap in zip(rows, new, gaps, strict=True):
            row.first_token = now
            row.take(ids, gap, self.eos)
        kept = [i for i, row in enumerate(rows) if row.finish is None]
        self._compact(first_row, kept, [len(rows[i].request.prompt_ids) for i in kept])
        if self.drafter is not None and kept:
            next_BT = ids_BT.roll(-1, dims=1)
            next_BT[each, last_B] = new_B1[:, 0]
            keep = torch.tensor(kept, device=device)
            aux_BTA = torch.cat(tapped, dim=-1)[keep]
            states.append(self.drafter.read(first_row, aux_BTA, next_BT[keep], positions_BT[keep], last_B[keep]))
        self.rows += [rows[i] for i in kept]
        return [row for row in rows if row.finish is not None]

    def _drafts(self, states: list[Tensor]) -> Tensor:
        """[B, k] draft tokens of every active row."""
        device = self.model.device
        if self.drafter is None:
            return torch.empty(len(self.rows), 0, dtype=torch.long, device=device)
        return self.drafter.propose(
            torch.cat(states), torch.tensor([r.last_position - 1 for r in self.rows], device=device)
        )

    def _step(self, drafts_Bk: Tensor) -> tuple[list[Row], list[Tensor]]:
        """Verify the drafts of every active row; returns the finished rows, and the drafter's state of the others."""
        device, rows = self.model.device, self.rows
        last = torch.tensor([[r.output[-1], r.last_position] for r in rows], device=device)
        fed_BQ = torch.cat([last[:, :1], drafts_Bk], dim=1)
        positions_BQ = last[:, 1:] + torch.arange(self.k + 1, device=device)
        length = max(r.last_position for r in rows) + self.k + 1
        hidden_BQH, tapped = self.model.forward(fed_BQ, positions_BQ, self.cache, length, self.taps)
        new_BQ, gaps_BQ = self._choose(self.model.logits(hidden_BQH), rows)
        accepted_B = (fed_BQ[:, 1:] == new_BQ[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        lengths = []
        for row, ids, gaps, accepted in zip(rows, new_BQ.tolist(), gaps_BQ.tolist(), accepted_B.tolist(), strict=True):
            lengths.append(row.last_position + 1 + accepted)
            row.verify_steps += 1
            # All that the verification accepts counts, also what `take` then cuts off past the stop.
            for i in range(accepted):
                row.accepted_at[i] += 1
            row.take(ids[: accepted + 1], gaps[: accepted + 1], self.eos)
        kept = self._surviving_order()
        self._compact(0, kept, [lengths[i] for i in kept])
        states = []
        if self.drafter is not None and kept:
            # Rows past the accepted drafts are read as well: their slots lie beyond every query that counts, and
            # the next step writes over them.
            keep = torch.tensor(kept, device=device)
            aux_BQA = torch.cat(tapped, dim=-1)[keep]
            states = [self.drafter.read(0, aux_BQA, new_BQ[keep], positions_BQ[keep], accepted_B[keep])]
        finished = [row for row in rows if row.finish is not None]
        self.rows = [rows[i] for i in kept]
        return finished, states

    def _surviving_order(self) -> list[int]:
        """Old row of each new row: survivors stay where they are, the last ones fill the gaps."""
        order = list(range(len(self.rows)))
        i = 0
        while i < len(order):
            if self.rows[order[i]].finish is None:
                i += 1
                continue
            moved = order.pop()
            if i < len(order):
                order[i] = moved
        return order

    def _compact(self, first_row: int, kept: Sequence[int], lengths: Sequence[int]) -> None:
        """Move the kept rows (offsets from `first_row`) to the front."""
        for new, (old, length) in enumerate(zip(kept, lengths, strict=True)):
            if new != old:
                self.cache.move(first_row + old, first_row + new, length)
                if self.drafter is not None:
                    self.drafter.move(first_row + old, first_row + new)

    def _choose(self, logits_BQV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """The target's tokens [B, Q] at the next Q output positions of each row, greedy or drawn, and its top-2 gaps.

        Those after a draft that is not accepted mean nothing: their logits come from a text that is not written.
        """
        ids_BQ, gaps_BQ = greedy(logits_BQV)
        drawn = [i for i, row in enumerate(rows) if row.request.temperature > 0]
        if drawn:
            device, queries = logits_BQV.device, logits_BQV.shape[1]
            asked = [
                (row.request.temperature, row.request.top_p, uniform)
                for row in map(rows.__getitem__, drawn)
                for uniform in row.uniforms[len(row.output) : len(row.output) + queries]
            ]
            temperature, top_p, uniform = torch.tensor(asked, dtype=torch.float64, device=device).unbind(1)
            index = torch.tensor(drawn, device=device)
            logits_NV = logits_BQV[index].flatten(0, 1)
            ids_BQ[index] = sample(logits_NV, temperature, top_p, uniform).view(-1, queries)
        return ids_BQ, gaps_BQ
