"""The one benchmark runner: it drives an `Endpoint`, whatever engine is behind it, and stores what was counted.

Acceptance pass: T=0, counters per request. Timing pass: fixed output lengths, with and without the drafter in ABBA
order at each concurrency. No figure is derived here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from eagle3x.benchmark.records import Batch, RequestRecord, append_batch, read_batches, requests
from eagle3x.engines.base import Endpoint
from eagle3x.progress import track
from eagle3x.types import Completion, EagleError, Request, SpecCounters, total

Open = Callable[[], Endpoint]
"""Starts (or attaches to) the engine, with or without the drafter; the endpoint is closed by its `with`."""

SETTLE_SECONDS = 0.05
"""Between two readings of an engine's totals that must be equal to count as stable."""
SETTLE_TIMEOUT = 10.0
BATCHES_PER_SLOT = 4
"""An acceptance pass is stored every 4 requests per concurrent slot: seldom enough to keep the slots full."""


class InvalidCellError(EagleError):
    """The measurement cannot be trusted, for example because someone else used the server. Nothing of it is kept."""


@dataclass(frozen=True)
class Workload:
    """The requests of a pass. `categories`: of each request id. `warmup`: how many are answered first, uncounted."""

    requests: tuple[Request, ...]
    categories: Mapping[str, str]
    warmup: int


@dataclass(frozen=True)
class Leg:
    """One run of the timing pass over all its requests."""

    number: int
    drafter: bool
    concurrency: int


def acceptance_pass(
    serve: Open, work: Workload, concurrency: int, num_speculative_tokens: int | None, file: Path, title: str
) -> list[Batch]:
    """Answer every request and append its record to `file`, batch by batch; what `file` already has is not redone.

    `num_speculative_tokens`: k, or None without a drafter. An engine that has totals only is measured one request at a
    time, by the difference of its totals.
    Raises InvalidCellError if the totals moved by more than these requests explain.
    """
    done = read_batches(file)
    known = {record.id for record in requests(done)}
    waiting = [r for r in work.requests if r.id not in known]
    if not waiting:
        return done
    k = num_speculative_tokens
    with serve() as endpoint:
        if k is not None and not endpoint.counts_past_stop:
            raise EagleError("this engine does not count drafts accepted past the stop: replay would not be comparable")
        single = k is not None and not endpoint.per_request_counters
        slots = 1 if single else concurrency
        size = 1 if single else concurrency * BATCHES_PER_SLOT
        parts = [waiting[i : i + size] for i in range(0, len(waiting), size)]
        _warm_up(endpoint, work, slots, k)
        for number, part in enumerate(track(parts, title, len(parts)), len(done)):
            batch = _measure(endpoint, part, work.categories, Leg(number, k is not None, slots), k)
            if single:
                batch = replace(batch, requests=(_with_counters(batch.requests[0], batch.totals),))
            append_batch(file, batch)
            done.append(batch)
    return done


def timing_legs(concurrencies: Sequence[int], rounds: int) -> list[Leg]:
    """Baseline, drafter, drafter, baseline in each round, so that a drift of the machine cancels; all concurrencies
    in each, so that an engine that cannot hold both sides is started as seldom as possible."""
    sides = [side for _ in range(rounds) for side in (False, True, True, False)]
    plan = [(side, c) for side in sides for c in concurrencies]
    return [Leg(number, side, c) for number, (side, c) in enumerate(plan)]


def timing_pass(
    baseline: Open,
    drafter: Open,
    serve_both: bool,
    work: Workload,
    legs: Sequence[Leg],
    num_speculative_tokens: int,
    file: Path,
    title: str,
) -> list[Batch]:
    """Run the legs and append each to `file`; legs that `file` already has are not redone.

    Every request must ask for a fixed length (`ignore_eos`). `serve_both`: the machine holds both sides at once;
    else each is started when its turn comes and ended before the other.
    """
    if any(not r.ignore_eos for r in work.requests):
        raise ValueError("the timing pass needs requests of fixed length")
    done = read_batches(file)
    finished = {batch.number for batch in done}
    waiting = [leg for leg in legs if leg.number not in finished]
    opened: dict[bool, Endpoint] = {}
    with ExitStack() as both, ExitStack() as alone:
        for leg in track(waiting, title, len(waiting)):
            k = num_speculative_tokens if leg.drafter else None
            if leg.drafter not in opened:
                if not serve_both:
                    opened.clear()
                    alone.close()
                stack = both if serve_both else alone
                opened[leg.drafter] = stack.enter_context((drafter if leg.drafter else baseline)())
                _warm_up(opened[leg.drafter], work, leg.concurrency, k)
            batch = _measure(opened[leg.drafter], work.requests, work.categories, leg, k)
            _check_lengths(work.requests, batch)
            append_batch(file, batch)
            done.append(batch)
    return done


def _warm_up(endpoint: Endpoint, work: Workload, concurrency: int, k: int | None) -> None:
    if work.warmup:
        _measure(endpoint, work.requests[: work.warmup], work.categories, Leg(0, k is not None, concurrency), k)


def _measure(
    endpoint: Endpoint, asked: Sequence[Request], categories: Mapping[str, str], leg: Leg, k: int | None
) -> Batch:
    endpoint.flush_prefix_cache()
    before = _totals(endpoint, k)
    start = time.perf_counter()
    completions = list(endpoint.complete(asked, leg.concurrency))
    wall = time.perf_counter() - start
    _check_answers(asked, completions)
    _check_prefix_cache(asked, completions)
    totals = None if k is None or before is None else _difference(endpoint, before, completions, k)
    by_id = {c.id: c for c in completions}
    records = tuple(RequestRecord(categories[r.id], len(r.prompt_ids), by_id[r.id]) for r in asked)
    return Batch(leg.number, leg.drafter, leg.concurrency, wall, totals, records)


def _totals(endpoint: Endpoint, k: int | None) -> SpecCounters | None:
    """The totals before a batch: two equal readings, so that no earlier request is still being counted."""
    if k is None:
        return None
    reading = endpoint.totals()
    if reading is None:
        raise EagleError("the engine serves without speculation: it has no counters, although a drafter was given")
    deadline = time.monotonic() + SETTLE_TIMEOUT
    while not endpoint.per_request_counters:
        time.sleep(SETTLE_SECONDS)
        again = endpoint.totals()
        if again == reading:
            break
        if again is None or time.monotonic() > deadline:
            raise InvalidCellError("the engine's totals move although no request of ours runs: someone else uses it")
        reading = again
    return reading


def _difference(endpoint: Endpoint, before: SpecCounters, completions: Sequence[Completion], k: int) -> SpecCounters:
    """What the totals moved by, once they hold all of these requests; engines record after they have answered.

    With counters per request the sum must be met exactly. With totals alone, a request of n output tokens takes verify
    steps that yield n-1 to n-1+k tokens (its prefill yields the first; accepted drafts count past the stop).
    """
    counted = [c.counters for c in completions if c.counters is not None]
    if endpoint.per_request_counters and len(counted) < len(completions):
        raise EagleError("the engine promises counters per request, but an answer came without")
    least = sum(len(c.token_ids) - 1 for c in completions)
    deadline = time.monotonic() + SETTLE_TIMEOUT
    previous = None
    while True:
        reading = endpoint.totals()
        if reading is None:
            raise EagleError("the engine's counters disappeared during a pass")
        moved = _moved(reading, before)
        if moved is None:
            pass
        elif endpoint.per_request_counters:
            wanted = total(counted)
            if moved == wanted:
                return moved
            if _exceeds(moved, wanted):
                raise InvalidCellError(
                    f"the engine counted {moved.verify_steps} verify steps and {moved.accepted} accepted drafts, our"
                    f" requests have {wanted.verify_steps} and {wanted.accepted}: someone else uses it"
                )
        else:
            yielded = moved.verify_steps + moved.accepted
            if yielded > least + k * len(completions):
                raise InvalidCellError(
                    f"the engine's verify steps yielded {yielded} tokens, our requests explain at most"
                    f" {least + k * len(completions)}: someone else uses it"
                )
            if yielded >= least and reading == previous:
                return moved
        if time.monotonic() > deadline:
            raise InvalidCellError(
                f"after {SETTLE_TIMEOUT:.0f} s the engine's counters ({moved}) do not explain the {least} tokens that"
                " verify steps must have yielded: they do not count every step"
            )
        previous = reading
        time.sleep(SETTLE_SECONDS)


def _moved(reading: SpecCounters, before: SpecCounters) -> SpecCounters | None:
    """The difference; None while it is no set of counters, because its parts were not read at one moment."""
    try:
        return reading - before
    except ValueError:
        return None


def _exceeds(a: SpecCounters, b: SpecCounters) -> bool:
    pairs = zip((a.verify_steps, a.drafted, *a.accepted_at), (b.verify_steps, b.drafted, *b.accepted_at), strict=True)
    return any(x > y for x, y in pairs)


def _with_counters(record: RequestRecord, counters: SpecCounters | None) -> RequestRecord:
    return replace(record, completion=replace(record.completion, counters=counters))


def _check_answers(asked: Sequence[Request], completions: Sequence[Completion]) -> None:
    if sorted(c.id for c in completions) != sorted(r.id for r in asked):
        raise EagleError(f"the engine answered {len(completions)} of {len(asked)} requests, or others than asked")
    if empty := [c.id for c in completions if not c.token_ids]:
        raise EagleError(f"the engine answered request {empty[0]} with no token at all")


def _check_lengths(asked: Sequence[Request], batch: Batch) -> None:
    wanted = {r.id: r.max_tokens for r in asked}
    for record in batch.requests:
        if len(record.completion.token_ids) != wanted[record.id]:
            raise EagleError(
                f"request {record.id} of the timing pass has {len(record.completion.token_ids)} tokens, not"
                f" {wanted[record.id]}: the engine does not honour ignore_eos, or ran out of context"
            )


def _check_prefix_cache(asked: Sequence[Request], completions: Sequence[Completion]) -> None:
    """No prompt may find more cached than it shares with another of its own pass (a chat template's first lines)."""
    ordered = sorted(asked, key=lambda r: r.prompt_ids)
    shared = {r.id: 0 for r in asked}
    for a, b in pairwise(ordered):
        same = next(
            (i for i, (x, y) in enumerate(zip(a.prompt_ids, b.prompt_ids, strict=False)) if x != y),
            min(len(a.prompt_ids), len(b.prompt_ids)),
        )
        shared[a.id], shared[b.id] = max(shared[a.id], same), max(shared[b.id], same)
    for c in completions:
        if c.cached_tokens is not None and c.cached_tokens > shared[c.id]:
            raise InvalidCellError(
                f"request {c.id} found {c.cached_tokens} prompt tokens in the prefix cache, {shared[c.id]} at most can"
                " come from this pass: the cache was not flushed"
            )
