"""The benchmark's counters per request, as read back for paired comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3x.benchmark.records import counters_of, parse_counters, read_batches, read_lines, requests
from eagle3x.types import EagleError, SpecCounters


@dataclass(frozen=True)
class Request:
    """What the engine counted for one prompt, and what replay predicts (None where replay does not apply)."""

    id: str
    served: SpecCounters
    replayed: SpecCounters | None


def read_requests(benchmark_dir: Path) -> dict[str, Request]:
    """The requests of a benchmark artifact by prompt id.

    Raises:
        EagleError: the pass is missing or is not what the benchmark writes.
    """
    path = benchmark_dir / "acceptance.jsonl"
    if not path.is_file():
        raise EagleError(f"{path} is missing: the cells of this benchmark cannot be compared")
    replayed = {r["id"]: parse_counters(r) for r in read_lines(benchmark_dir / "replay.jsonl")}
    served = requests(read_batches(path))
    return {r.id: Request(r.id, counters_of(r), replayed.get(r.id)) for r in served}
