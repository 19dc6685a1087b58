"""Datasets in directories, of the shapes that public ones have; the library that reads them reads the hub alike."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import datasets
import pytest

from eagle3x import hub
from eagle3x.data import sources
from eagle3x.data.config import Data
from eagle3x.types import ConfigError, EagleError, Message

GSM8K = [{"question": f"How much is {i} and {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(5)]
MATH_500 = [{"problem": "Solve $x=1$.", "solution": "1", "answer": "1", "subject": "Algebra", "level": 2}]
MT_BENCH = [{"prompt_id": 7, "prompt": ["Write.", "Shorten it."], "category": "writing", "reference": []}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3X_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "arrow")


def folder(path: Path, rows: list[dict[str, Any]], split: str = "test") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def hf(directory: Path | None, **overrides: Any) -> Data:
    values = {
        "source": "hf", "path": None if directory is None else str(directory), "hub_id": None, "revision": None,
        "subset": None, "split": "test", "rows": None, "columns": {}, "format": "auto", "responses": "regenerate",
        "limit_train": None, "limit_eval": None, "val_fraction": 0.25, "eval_fraction": 0.25, "max_sample_tokens": 64,
        "chat_template_kwargs": {}, "magpie": None,
    }  # fmt: skip
    return Data(**{**values, **overrides})


def test_columns_give_our_keys(tmp_path: Path) -> None:
    data = hf(folder(tmp_path / "gsm8k", GSM8K), columns={"prompt": "question"})
    sources.check(data)
    records = sources.read(data)
    assert [r.messages for r in records] == [(Message("user", row["question"]),) for row in GSM8K]
    assert records[2].where == f"{tmp_path}/gsm8k test:3"
    assert {r.split for r in records} == {None}  # a dataset's split is not ours

    (record,) = sources.read(
        hf(folder(tmp_path / "math", MATH_500), columns={"prompt": "problem", "category": "subject"})
    )
    assert (record.category, record.messages) == ("Algebra", (Message("user", "Solve $x=1$."),))
    columns = {"turns": "prompt", "category": "category", "id": "prompt_id"}
    (record,) = sources.read(hf(folder(tmp_path / "mt_bench", MT_BENCH), columns=columns))
    assert (record.id, record.category, record.messages) == ("7", "writing", (Message("user", "Write."),))


def test_columns_named_like_ours_need_no_word(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    rows = [{"messages": talk, "source": "x", "category": None}, {"messages": talk[:1], "source": "y", "category": "c"}]
    answered, asked = sources.read(hf(folder(tmp_path / "chats", rows)))
    assert (answered.answered, answered.category) == (True, "uncategorised")
    assert (asked.answered, asked.category) == (False, "c")


def test_rows_streams_the_first_ones(tmp_path: Path) -> None:
    path = folder(tmp_path / "d", [*GSM8K, {"question": 5, "answer": "a number, which no prompt is"}])
    some = hf(path, columns={"prompt": "question"}, rows=2)
    assert [r.messages[0].content for r in sources.read(some)] == ["How much is 0 and 0?", "How much is 1 and 1?"]


def test_a_saved_dataset(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(GSM8K)
    datasets.DatasetDict({"test": made, "train": made.select([4])}).save_to_disk(tmp_path / "both")
    made.select([1, 3]).save_to_disk(tmp_path / "one")
    columns = {"prompt": "question"}
    assert len(sources.read(hf(tmp_path / "both", columns=columns))) == 5
    (record,) = sources.read(hf(tmp_path / "both", columns=columns, split="train"))
    assert record.messages[0].content == "How much is 4 and 4?"
    assert len(sources.read(hf(tmp_path / "one", columns=columns))) == 2
    with pytest.raises(ConfigError, match="both has no split 'dev'; it has test, train"):
        sources.read(hf(tmp_path / "both", columns=columns, split="dev"))


def test_identity_is_what_was_read(tmp_path: Path) -> None:
    columns = {"prompt": "question"}
    first = sources.identity(hf(folder(tmp_path / "a", GSM8K), columns=columns))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert sources.identity(hf(tmp_path / "b", columns=columns)) == first
    assert sources.identity(hf(tmp_path / "b", columns=columns, rows=3)) != first
    folder(tmp_path / "b", [{"question": "Other?", "answer": ""}])
    assert sources.identity(hf(tmp_path / "b", columns=columns)) != first
    as_file = tmp_path / "rows.jsonl"
    as_file.write_text("".join(json.dumps({"prompt": row["question"]}) + "\n" for row in GSM8K))
    assert sources.identity(hf(as_file, source="jsonl", split=None)) == first


def test_the_origin_is_recorded(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", GSM8K)
    origin = sources.origin(hf(path, columns={"prompt": "question"}, rows=3))
    assert {k: v for k, v in origin.items() if k != "content"} == {
        "subset": None, "split": "test", "rows": 3, "columns": {"prompt": "question"},
    }  # fmt: skip
    assert len(origin["content"]) == 64


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = folder(tmp_path / "d", GSM8K)
    with pytest.raises(ConfigError, match=r"d:1 has no column messages or .*; it has question, answer: say which"):
        sources.read(hf(path))
    with pytest.raises(ConfigError, match=r"d:1 has no column text; it has question, answer"):
        sources.read(hf(path, columns={"prompt": "text"}))
    with pytest.raises(ConfigError, match=r"d cannot be read: .*train"):
        sources.read(hf(path, columns={"prompt": "question"}, split="train"))
    numbers = folder(tmp_path / "numbers", [{"prompt": 3}])
    with pytest.raises(ConfigError, match=r"numbers test:1: prompt is a JSON number; a text is right"):
        sources.read(hf(numbers))
    with pytest.raises(ConfigError, match="no such directory"):
        sources.check(hf(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"data.hub_id=.* is no dataset of the hub"):
        sources.check(hf(None, hub_id="no/such/name"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, "data.hub_id .* or data.path"),
        ({"hub_id": "a/b", "path": "c"}, "one of them"),
        ({"path": "c", "revision": "main"}, "a revision is of the hub"),
        ({"hub_id": "a/b", "split": None}, "split must name"),
        ({"hub_id": "a/b", "rows": 0}, "rows must be"),
        ({"hub_id": "a/b", "columns": {"question": "prompt"}}, "question is none of our keys"),
        ({"source": "jsonl", "path": "c"}, "split is of datasets: use data=hf"),
    ],
)
def test_places_that_do_not_fit_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf(None, **overrides)


def test_a_library_that_would_read_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = hf(folder(tmp_path / "d", GSM8K))
    monkeypatch.setattr("eagle3x.data.datasets.version", lambda _: "4.9.1")
    with pytest.raises(ConfigError, match=r"data=hf needs datasets 5\.2 or newer, not 4\.9\.1"):
        sources.check(data)

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("eagle3x.data.datasets.version", missing)
    with pytest.raises(ConfigError, match="data=hf needs the library datasets"):
        sources.check(data)


def test_a_folder_that_is_called_like_a_repository_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "openai" / "gsm8k", GSM8K)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("eagle3x.hub.dataset", lambda *_: hub.Dataset("f" * 40, None))
    with pytest.raises(ConfigError, match="openai/gsm8k cannot be read"):
        sources.read(hf(None, hub_id="openai/gsm8k", columns={"prompt": "question"}))


def test_without_network_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EagleError, match=r"(?s)hub_id=a/b cannot be .*copy the directory here"):
        sources.identity(hf(None, hub_id="a/b"))


def test_a_commit_that_was_read_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, found = "0123456789abcdef" * 2 + "01234567", []
    path = str(folder(tmp_path / "hub", GSM8K))

    def dataset(hub_id: str, revision: str | None) -> hub.Dataset:
        found.append((hub_id, revision))
        return hub.Dataset(commit, "mit")

    monkeypatch.setattr("eagle3x.hub.dataset", dataset)  # the hub's answer; rows are read from a directory
    real = datasets.load_dataset
    monkeypatch.setattr("datasets.load_dataset", lambda _, **more: real(path, **{**more, "revision": None}))
    branch = hf(None, hub_id="openai/gsm8k", columns={"prompt": "question"})
    assert len(sources.read(branch)) == 5
    assert found == [("openai/gsm8k", None)]
    pinned = replace(branch, revision=commit)
    assert sources.identity(pinned) == sources.identity(branch)
    found.clear()
    assert sources.origin(pinned) == {
        "hub_id": "openai/gsm8k", "revision": commit, "licence": "mit", "subset": None, "split": "test", "rows": None,
        "columns": {"prompt": "question"},
    }  # fmt: skip
    assert found == []
