"""What a pass leaves on disk: JSON lines, one request a line, written batch by batch.

A batch that a kill cut short is dropped when the file is read, so a killed pass loses one batch and resumes there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3x.types import Completion, EagleError, SpecCounters, Timing


@dataclass(frozen=True)
class RequestRecord:
    """One answered request. `completion.counters` is None without a drafter, and where a batch has only its totals."""

    category: str
    prompt_tokens: int
    completion: Completion

    @property
    def id(self) -> str:
        """The prompt's id: the cluster of every interval."""
        return self.completion.id

    @property
    def decode_seconds(self) -> float:
        """First token to last token."""
        return self.completion.timing.end - self.completion.timing.first_token

    @property
    def end_to_end_seconds(self) -> float:
        """Request sent to last token."""
        return self.completion.timing.end - self.completion.timing.start


@dataclass(frozen=True)
class Batch:
    """Requests that were measured together: a part of an acceptance pass, or one leg of the timing pass.

    `totals`: difference of the engine's totals over the batch; None without a drafter. `wall_seconds`: of the batch.
    """

    number: int
    drafter: bool
    concurrency: int
    wall_seconds: float
    totals: SpecCounters | None
    requests: tuple[RequestRecord, ...]


def requests(batches: Sequence[Batch]) -> list[RequestRecord]:
    """All requests, in order."""
    return [record for batch in batches for record in batch.requests]


def counters_of(record: RequestRecord) -> SpecCounters:
    """The request's counters. Raises EagleError if it has none."""
    if record.completion.counters is None:
        raise EagleError(f"request {record.id} was recorded without counters")
    return record.completion.counters


def parse_counters(record: dict[str, Any]) -> SpecCounters:
    """Counters from JSON values."""
    return SpecCounters(record["verify_steps"], record["drafted"], tuple(record["accepted_at"]))


def append_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Add JSON lines and wait until they are on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(r, separators=(",", ":"), allow_nan=False) + "\n" for r in records))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; none if it is absent. A torn last line is cut off the file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def append_batch(path: Path, batch: Batch) -> None:
    """Add a measured batch: each line is a request with what it shares with its batch."""
    shared = {
        "number": batch.number,
        "size": len(batch.requests),
        "drafter": batch.drafter,
        "concurrency": batch.concurrency,
        "wall_seconds": batch.wall_seconds,
        "totals": None if batch.totals is None else asdict(batch.totals),
    }
    lines = []
    for record in batch.requests:
        answer = asdict(record.completion)
        place = {"category": record.category, "prompt_tokens": record.prompt_tokens}
        lines.append({"id": answer.pop("id"), **place, **answer, "batch": shared})
    append_lines(path, lines)


def read_batches(path: Path) -> list[Batch]:
    """The whole batches of a pass, in the order in which they were measured. Lines of a torn batch are cut off."""
    lines = read_lines(path)
    groups = [list(group) for _, group in groupby(lines, key=lambda line: line["batch"]["number"])]
    if groups and len(groups[-1]) < groups[-1][0]["batch"]["size"]:
        kept = path.read_bytes().splitlines(keepends=True)[: len(lines) - len(groups.pop())]
        os.truncate(path, sum(map(len, kept)))
    return [_batch(group) for group in groups]


def _batch(lines: Sequence[dict[str, Any]]) -> Batch:
    shared = lines[0]["batch"]
    return Batch(
        number=shared["number"],
        drafter=shared["drafter"],
        concurrency=shared["concurrency"],
        wall_seconds=shared["wall_seconds"],
        totals=None if shared["totals"] is None else parse_counters(shared["totals"]),
        requests=tuple(RequestRecord(r["category"], r["prompt_tokens"], _completion(r)) for r in lines),
    )


def _completion(record: dict[str, Any]) -> Completion:
    gaps = record["top2_gaps"]
    return Completion(
        id=record["id"],
        token_ids=tuple(record["token_ids"]),
        finish=record["finish"],
        timing=Timing(**record["timing"]),
        counters=None if record["counters"] is None else parse_counters(record["counters"]),
        cached_tokens=record["cached_tokens"],
        top2_gaps=None if gaps is None else tuple(gaps),
    )
