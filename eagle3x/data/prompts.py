"""Stage `prompts`: from the records of a source to prompts with a split, no duplicates, no leaks. No torch here."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from eagle3x.data import magpie, sources
from eagle3x.data.config import Data
from eagle3x.data.leaks import LEAK_WORDS, leaking
from eagle3x.data.records import write_prompts
from eagle3x.data.sources import Record
from eagle3x.identity import digest
from eagle3x.progress import log
from eagle3x.types import ConfigError, Message, Prompt, Split

if TYPE_CHECKING:
    from eagle3x.pipeline import StageRun

SHOWN_IDS = 20


@dataclass(frozen=True)
class Selection:
    """Prompts with their splits, in file order, and what was left out on the way."""

    prompts: list[Prompt]
    duplicates: list[str]
    """Where the records are whose question another record asks already."""
    leaks: list[str]
    """Ids of train prompts that share text with an eval prompt."""
    dropped_answers: int
    """Answers at the end of a conversation that the target writes anew."""
    other_split: int
    """Records of `data` that name eval and of `eval` that name train, where each has a source of its own."""


def make(run: StageRun) -> dict[str, Any]:
    """Write `prompts.parquet` into `run.work`; the facts count what is there and what was left out.

    Raises:
        ConfigError: lines that are no records, one id for two prompts, or a split that would be empty.
    """
    evaluation = sources.read(run.cfg.eval)  # a fault in it must not cost what comes next
    drawn = magpie.write(run) if run.cfg.data.source == "magpie" else None
    records = sources.read(run.cfg.data) if drawn is None else drawn.records
    selected = select(records, run.cfg.data, evaluation)
    write_prompts(run.work, selected.prompts)
    _report("ask a question that is there already", selected.duplicates)
    _report(f"share {LEAK_WORDS} words in a row with an eval prompt", selected.leaks)
    if selected.other_split:
        log(f"prompts: {selected.other_split} left out, for they name the split that another source gives")
    facts = {
        "records": len(records) + len(evaluation),
        "origin": {"data": sources.origin(run.cfg.data), "eval": sources.origin(run.cfg.eval)},
        "splits": {split: _counts(selected.prompts, split) for split in get_args(Split)},
        "duplicates": len(selected.duplicates),
        "leaks": len(selected.leaks),
        "leak_ids": selected.leaks[:SHOWN_IDS],
        "dropped_answers": selected.dropped_answers,
        "other_split": selected.other_split,
        **({} if drawn is None else {"magpie": drawn.counts}),
    }
    if drawn is not None:
        drawn.parts.drop()  # last: they were paid for
    return facts


def select(records: Sequence[Record], data: Data, evaluation: Sequence[Record] = ()) -> Selection:
    """Give every record its split: the one that it names, else by hash of its id; `val` is then taken from `train`.

    With `evaluation`, records that are all there is of `eval`, the others are for training.

    With `data.responses=given` the train prompts keep their answer. All other prompts end with the user's turn: what
    chooses and measures a drafter is the greedy text of the target itself.

    Raises:
        ConfigError: two different prompts of one id, or a split that would be empty.
    """
    other_split = 0
    if evaluation:
        parted = [
            *(replace(r, split="train") for r in records if r.split != "eval"),
            *(replace(r, split="eval") for r in evaluation if r.split != "train"),
        ]
        other_split = len(records) + len(evaluation) - len(parted)
        records = parted
    unique, duplicates = _unique(records)
    held_out = {id for id, record in unique.items() if record.split == "eval"}
    unnamed = [_prompt(id, record) for id, record in unique.items() if record.split is None]
    if unnamed:
        at_least = 0 if held_out else 1
        held_out |= {p.id for p in stratified(unnamed, "eval")[: _share(data.eval_fraction, len(unnamed), at_least)]}

    prompts = [_prompt(id, record, "eval" if id in held_out else "train") for id, record in unique.items()]
    held = [p for p in prompts if p.split == "eval"]
    leaks = leaking([p for p in prompts if p.split == "train"], held)
    train = _limit([p for p in prompts if p.split == "train" and p.id not in leaks], data.limit_train)
    val = {p.id for p in stratified(train, "val")[: _share(data.val_fraction, len(train), at_least=1)]}
    kept = {p.id for p in (*train, *_limit(held, data.limit_eval))}
    chosen = [replace(p, split="val") if p.id in val else p for p in prompts if p.id in kept]
    _refuse_empty(chosen, len(records), len(leaks))

    final = [p if p.split == "train" and data.responses == "given" else _question(p) for p in chosen]
    return Selection(
        prompts=final,
        duplicates=duplicates,
        leaks=sorted(leaks),
        dropped_answers=sum(len(a.messages) - len(b.messages) for a, b in zip(chosen, final, strict=True)),
        other_split=other_split,
    )


def stratified(prompts: Sequence[Prompt], purpose: str) -> list[Prompt]:
    """An order whose every beginning holds the categories in about the proportion of the whole.

    It depends on ids and categories only, not on the order of the file: within a category prompts are ordered by the
    hash of their id, and the prompt at rank r of n gets the place (r + 1/2) / n. `purpose` makes independent orders.
    """
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for p in prompts:
        by_category[p.category].append(p)
    places: list[tuple[float, str, Prompt]] = []
    for category, members in by_category.items():
        members.sort(key=lambda p: _hash(purpose, p.id))
        tie = _hash(purpose, category)
        places += [((rank + 0.5) / len(members), tie, p) for rank, p in enumerate(members)]
    return [p for _, _, p in sorted(places, key=lambda place: place[:2])]


def _unique(records: Sequence[Record]) -> tuple[dict[str, Record], list[str]]:
    """Records by id, in file order, one per question (of several the first, or the first that names `eval`)."""
    first: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: r.split != "eval"):
        first.setdefault(_content(record), record)
    chosen = {record.where for record in first.values()}
    unique: dict[str, Record] = {}
    clashes: list[str] = []
    for record in records:
        if record.where not in chosen:
            continue
        id = record.id if record.id is not None else _content(record)[:16]
        if id in unique:
            clashes.append(f"{record.where}: id {id!r} is that of {unique[id].where} already")
        else:
            unique[id] = record
    if clashes:
        shown = "\n  ".join(clashes[: sources.SHOWN_PROBLEMS])
        raise ConfigError(f"{len(clashes)} x one id for two prompts; give each its own, or none:\n  {shown}")
    return unique, [r.where for r in records if r.where not in chosen]


def _content(record: Record) -> str:
    question = _without_answer(record.messages)
    asked = [*question, *(Message("user", text) for text in record.follow_ups)]
    return digest([[m.role, " ".join(m.content.split())] for m in asked])


def _prompt(id: str, record: Record, split: Split = "train") -> Prompt:
    return Prompt(id, record.category, split, record.messages, record.follow_ups)


def _question(prompt: Prompt) -> Prompt:
    return replace(prompt, messages=_without_answer(prompt.messages))


def _without_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return messages[:-1] if messages[-1].role == "assistant" else messages


def _limit(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    return prompts if limit is None else stratified(prompts, "limit")[: max(0, limit)]


def _share(fraction: float, count: int, at_least: int) -> int:
    return max(at_least, int(fraction * count + 0.5))


def _hash(purpose: str, text: str) -> str:
    return hashlib.sha256(f"{purpose}:{text}".encode()).hexdigest()


def _refuse_empty(prompts: Sequence[Prompt], records: int, leaks: int) -> None:
    counts = Counter(p.split for p in prompts)
    empty = [split for split in get_args(Split) if not counts[split]]
    if empty:
        why = f", of which {leaks} leak into eval" if leaks else ""
        raise ConfigError(
            f"no prompts for {' and '.join(empty)}: {records} records{why}; at least three different ones are needed,"
            " one each for train, val and eval (see split in the records, data.limit_train, data.limit_eval)"
        )


def _counts(prompts: Sequence[Prompt], split: str) -> dict[str, Any]:
    members = [p for p in prompts if p.split == split]
    return {
        "prompts": len(members),
        "multi_turn": sum(sum(m.role == "user" for m in p.messages) + len(p.follow_ups) > 1 for p in members),
        "categories": dict(sorted(Counter(p.category for p in members).items())),
    }


def _report(what: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - SHOWN_IDS} more" if len(names) > SHOWN_IDS else ""
        log(f"prompts: {len(names)} left out, they {what}: {', '.join(names[:SHOWN_IDS])}{more}")
