"""Splits, limits, duplicates and leaks."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from eagle3x.data import prompts
from eagle3x.data.config import Data, EvalPrompts
from eagle3x.data.leaks import leaking
from eagle3x.data.records import read_prompts
from eagle3x.data.sources import Record
from eagle3x.types import ConfigError, Message, Prompt

NOWHERE: dict[str, Any] = {
    "path": None, "hub_id": None, "revision": None, "subset": None, "split": None, "rows": None, "columns": {},
    "format": "auto",
}  # fmt: skip


def data(**overrides: Any) -> Data:
    values = {
        "source": "jsonl", **NOWHERE, "path": "x.jsonl", "responses": "regenerate", "limit_train": None,
        "limit_eval": None, "val_fraction": 0.25, "eval_fraction": 0.25, "max_sample_tokens": 64,
        "chat_template_kwargs": {}, "magpie": None,
    }  # fmt: skip
    return Data(**{**values, **overrides})


def record(
    line: int, text: str, category: str = "c", split: Literal["train", "eval"] | None = None, id: str | None = "",
    answer: str | None = None, follow_ups: tuple[str, ...] = (),
) -> Record:  # fmt: skip
    messages = (Message("user", text), *([Message("assistant", answer)] if answer else []))
    return Record(f"x.jsonl:{line}", f"p{line}" if id == "" else id, category, split, messages, follow_ups)


def numbered(count: int, categories: int, **more: Any) -> list[Record]:
    return [record(i, f"question number {i}", f"c{i % categories}", **more) for i in range(count)]


def ids(selected: prompts.Selection, split: str) -> list[str]:
    return [p.id for p in selected.prompts if p.split == split]


def test_shares_are_exact_and_even_over_categories() -> None:
    selected = prompts.select(numbered(80, 4), data())
    by = {s: Counter(p.category for p in selected.prompts if p.split == s) for s in ("train", "val", "eval")}
    assert by["eval"] == {f"c{i}": 5 for i in range(4)}  # 80 / 4, then a quarter of the 60 that are left
    assert sum(by["val"].values()) == 15
    assert set(by["val"].values()) == {3, 4}
    assert sum(by["train"].values()) == 45


def test_val_is_the_lowest_hash_of_each_category() -> None:
    records = [record(i, f"question number {i}", f"c{i % 2}", split="train") for i in range(8)]
    records.append(record(8, "another one", split="eval"))
    expected = {
        min((f"p{i}" for i in range(first, 8, 2)), key=lambda id: hashlib.sha256(f"val:{id}".encode()).hexdigest())
        for first in (0, 1)
    }
    assert set(ids(prompts.select(records, data()), "val")) == expected  # a quarter of 8, one in each category


def test_splits_do_not_depend_on_the_order_of_lines() -> None:
    records = numbered(40, 3)
    shuffled = random.Random(0).sample(records, len(records))
    a, b = prompts.select(records, data()), prompts.select(shuffled, data())
    assert shuffled != records
    assert {p.id: p.split for p in a.prompts} == {p.id: p.split for p in b.prompts}
    assert [p.id for p in b.prompts] == [r.id for r in shuffled]  # file order is kept


def test_a_small_category_is_not_emptied() -> None:
    records = [
        *numbered(62, 1, split="train"),
        record(98, "rare a", "rare", "train"),
        record(99, "rare b", "rare", "train"),
    ]
    records.append(record(100, "held out", split="eval"))
    selected = prompts.select(records, data(val_fraction=0.125))
    assert len(ids(selected, "val")) == 8
    assert {"p98", "p99"} <= set(ids(selected, "train"))


def test_named_splits_are_kept_and_the_others_are_shared_out() -> None:
    records = [*numbered(8, 1), record(50, "held out", split="eval"), record(51, "for training", split="train")]
    selected = prompts.select(records, data())
    assert "p50" in ids(selected, "eval")
    assert "p51" not in ids(selected, "eval")
    assert len(ids(selected, "eval")) == 1 + 2  # a quarter of the eight that name none


def test_limits_are_even_and_nested() -> None:
    records = [
        *numbered(40, 4, split="train"),
        *[record(100 + i, f"other {i}", f"c{i % 4}", "eval") for i in range(20)],
    ]
    small = prompts.select(records, data(limit_train=8, limit_eval=4))
    large = prompts.select(records, data(limit_train=16, limit_eval=8))
    assert Counter(p.category for p in small.prompts if p.split == "eval") == {f"c{i}": 1 for i in range(4)}
    assert Counter(p.category for p in small.prompts if p.split != "eval") == {f"c{i}": 2 for i in range(4)}
    assert len(ids(small, "val")) == 2
    assert {p.id for p in small.prompts} < {p.id for p in large.prompts}
    assert len(large.prompts) == 16 + 8


EIGHT = "one two three four five six seven eight"


@pytest.mark.parametrize(
    ("train", "leaks"),
    [
        (f"Well: ONE, two three; four five six seven eight!! {'and more ' * 3}", True),
        ("zero one two three four five six seven nine ten", False),  # seven in a row
        ("Short Question?", True),
        ("A short question?", False),
    ],
)
def test_leaks(train: str, leaks: bool) -> None:
    records = [
        record(0, train, split="train"),
        record(1, f"before {EIGHT} after", split="eval"),
        record(2, "short question", split="eval"),
        *[record(10 + i, f"something else {i}", split="train") for i in range(4)],
    ]
    selected = prompts.select(records, data())
    assert selected.leaks == (["p0"] if leaks else [])
    assert ("p0" in {p.id for p in selected.prompts}) is not leaks
    assert sorted(ids(selected, "eval")) == ["p1", "p2"]


def test_a_shared_system_message_or_answer_is_no_leak() -> None:
    system, answer = Message("system", EIGHT), Message("assistant", EIGHT)
    train = Prompt("a", "c", "train", (system, Message("user", "q1"), answer, Message("user", "q2")))
    held = Prompt("b", "c", "eval", (system, Message("user", "q3"), answer, Message("user", "q4")))
    assert leaking([train], [held]) == set()
    later = Prompt("d", "c", "eval", (Message("user", "q5"), answer, Message("user", "q2")))
    assert leaking([train], [later]) == {"a"}


def test_duplicates_go_and_are_named_and_eval_wins() -> None:
    records = [
        record(0, "Same question", split="train"),
        record(1, "Same   question\n", split="eval"),
        record(2, "Twice", id=None),
        record(3, "Twice", id=None),
        *[record(10 + i, f"something else {i}", split="train") for i in range(4)],
    ]
    selected = prompts.select(records, data())
    assert selected.duplicates == ["x.jsonl:0", "x.jsonl:3"]
    assert "p1" in ids(selected, "eval")
    assert selected.leaks == []


def test_ids_are_made_of_the_content() -> None:
    a = prompts.select([record(i, f"question {i}", id=None) for i in range(6)], data())
    b = prompts.select([record(i + 3, f"question {i}", id=None) for i in reversed(range(6))], data())
    assert {p.messages: p.id for p in a.prompts} == {p.messages: p.id for p in b.prompts}
    assert len({p.id for p in a.prompts}) == 6


def test_one_id_for_two_prompts_is_an_error() -> None:
    records = [record(0, "one", id="same"), record(1, "two", id="same"), record(2, "three")]
    with pytest.raises(ConfigError, match=r"x.jsonl:1: id 'same' is that of x.jsonl:0 already"):
        prompts.select(records, data())


def test_given_answers_stay_in_train_alone() -> None:
    records = [record(i, f"question {i}", answer=f"answer {i}") for i in range(8)]
    given = prompts.select(records, data(responses="given"))
    assert {p.split: p.messages[-1].role for p in given.prompts} == {
        "train": "assistant",
        "val": "user",
        "eval": "user",
    }
    assert given.dropped_answers == len(ids(given, "val")) + len(ids(given, "eval")) == 2 + 2
    fresh = prompts.select(records, data())
    assert {p.messages[-1].role for p in fresh.prompts} == {"user"}
    assert fresh.dropped_answers == 8


def test_follow_ups_belong_to_the_question() -> None:
    records = [record(i, "Write.", split="eval", follow_ups=(f"Shorten it {i}.",)) for i in range(3)]
    others = [record(10 + i, f"something else {i}", split="train") for i in range(4)]
    selected = prompts.select([*records, *others], data())
    assert not selected.duplicates
    assert {p.id: p.follow_ups for p in selected.prompts if p.split == "eval"} == {
        "p0": ("Shorten it 0.",), "p1": ("Shorten it 1.",), "p2": ("Shorten it 2.",),
    }  # fmt: skip
    asked_later = [record(0, "a", split="eval", follow_ups=("the leak",)), record(1, "The leak!", split="train")]
    assert prompts.select([*asked_later, *others], data()).leaks == ["p1"]


def test_eval_prompts_from_a_source_of_their_own() -> None:
    train = [*numbered(8, 1), record(50, "held out", split="eval"), record(51, f"{EIGHT} too")]
    evaluation = [record(60, f"benchmark: {EIGHT}"), record(61, "and more"), record(62, "not this", split="train")]
    selected = prompts.select(train, data(), evaluation)
    assert sorted(ids(selected, "eval")) == ["p60", "p61"]
    assert len(ids(selected, "val")) == 2  # a quarter of the eight
    assert len(ids(selected, "train")) == 6
    assert (selected.leaks, selected.other_split) == (["p51"], 2)


@pytest.mark.parametrize(
    ("records", "overrides", "empty"),
    [
        (numbered(6, 1, split="train"), {}, "eval"),
        (numbered(6, 1, split="eval"), {}, "train and val"),
        ([*numbered(6, 1), record(9, "x", split="eval")], {"limit_train": 1}, "train"),
        (numbered(1, 1), {}, "train and val"),
        (numbered(2, 1), {}, "train"),
    ],
)
def test_no_split_may_be_empty(records: list[Record], overrides: dict[str, Any], empty: str) -> None:
    with pytest.raises(ConfigError, match=f"no prompts for {empty}: {len(records)} records"):
        prompts.select(records, data(**overrides))


def test_three_prompts_are_enough() -> None:
    selected = prompts.select(numbered(3, 1), data())
    assert Counter(p.split for p in selected.prompts) == {"train": 1, "val": 1, "eval": 1}


def test_make_writes_the_builtin_prompts(tmp_path: Path) -> None:
    builtin = data(source="builtin", path=None, val_fraction=0.125)
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(data=builtin, eval=EvalPrompts(source="held_out", **NOWHERE)), work=tmp_path
    )
    facts = prompts.make(run)
    assert facts["records"] == 256
    assert {s: f["prompts"] for s, f in facts["splits"].items()} == {"train": 182, "val": 26, "eval": 48}
    assert facts["splits"]["eval"]["categories"]["math"] == 6
    assert facts["splits"]["train"]["multi_turn"] + facts["splits"]["val"]["multi_turn"] == 3
    assert facts["duplicates"] == facts["leaks"] == facts["dropped_answers"] == facts["other_split"] == 0
    written = read_prompts(tmp_path)
    assert len(written) == 256
    assert written[0] == Prompt("writing-train-01", "writing", written[0].split, written[0].messages)
    assert written[0].messages[0].content.startswith("Write a two-sentence story")
