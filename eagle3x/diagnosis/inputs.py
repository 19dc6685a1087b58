"""What a diagnosis reads of the stages below it: the texts and counters that were served, and the drafter twice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3x.benchmark.cell import ACCEPTANCE, CELL
from eagle3x.benchmark.measure import TEXTS
from eagle3x.benchmark.records import counters_of, read_batches, read_lines, requests
from eagle3x.diagnosis.captured_text import Text
from eagle3x.diagnosis.export_changes import Change, changes
from eagle3x.drafters import checkpoint
from eagle3x.drafters.export import CHECKPOINT, Export
from eagle3x.types import EagleError, Response, SpecCounters

if TYPE_CHECKING:
    from eagle3x.drafters.eagle3 import Eagle3
    from eagle3x.pipeline import StageRun


@dataclass(frozen=True)
class Served:
    """What the benchmark left: the texts that the served target wrote, and the counters of each."""

    texts: tuple[Text, ...]
    counters: tuple[SpecCounters, ...]
    cell: dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """The drafter as trained (None for one from elsewhere) and as served; why the served one cannot be loaded."""

    trained: Eagle3 | None
    served: Eagle3 | None
    unloadable: str | None
    changes: tuple[Change, ...]


def eval_text(response: Response, k: int) -> Text:
    """The response with k tokens past its stop, which is as far as k drafts reach."""
    tokens = response.token_ids[: response.prompt_tokens + response.response_tokens + k]
    return Text(response.id, tokens, response.prompt_tokens, response.response_tokens)


def served_by(run: StageRun, chosen: list[Response]) -> tuple[Served | None, str | None]:
    """What the benchmark measured, in the order of `chosen`; or why there is nothing."""
    if "benchmark" not in run.inputs:
        return None, run.failed["benchmark"]
    directory = run.inputs["benchmark"].path
    records = {r.id: r for r in requests(read_batches(directory / ACCEPTANCE))}
    further = {line["id"]: line for line in read_lines(directory / TEXTS)}
    if not further:
        return None, "trees are not replayed: a rung would compare a tree with a chain; use speculation=chain"
    if set(records) != {r.id for r in chosen}:
        raise EagleError("the benchmark asked other prompts than the eval text has")
    texts = []
    for response in chosen:
        record, line = records[response.id], further[response.id]
        output = record.completion.token_ids
        tokens = (*line["prompt_ids"], *output, *line["further"])
        texts.append(Text(response.id, tuple(tokens), len(line["prompt_ids"]), len(output)))
    cell = json.loads((directory / CELL).read_text(encoding="utf-8"))
    return Served(tuple(texts), tuple(counters_of(records[r.id]) for r in chosen), cell), None


def load(run: StageRun, export: Export) -> Loaded:
    """The drafter as trained, where it was trained here, and as exported, with what differs between the two."""
    trained = None
    found: list[Change] = []
    source = run.inputs["drafter"].path / CHECKPOINT
    if run.cfg.drafter.source == "custom":
        trained = checkpoint.load(source, run.target).eval().requires_grad_(False)
    try:
        published = checkpoint.read(export.directory)
        served = checkpoint.module(published, run.target).eval().requires_grad_(False)
    except EagleError as error:
        return Loaded(trained, None, str(error), ())
    if trained is not None:
        found = changes(checkpoint.read(source), published, run.target)
    return Loaded(trained, served, None, tuple(found))
