"""Parquet in and out."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3x.data import records
from eagle3x.types import EagleError, Message, Prompt, Response

PROMPTS = [
    Prompt("b", "math", "eval", (Message("system", "S"), Message("user", "2+2?\n\t☃"))),
    Prompt("a", "chat", "train", (Message("user", "Hi"), Message("assistant", "Hello")), ("And?", "So?")),
]
RESPONSES = [
    Response("r1", "math", "train", (5, 6, 7), (False, True, True), 1, 2, "stop"),
    Response("r2", "chat", "eval", (9, 8, 7, 49151), (False, False, True, False), 2, 1, "length"),
    Response("r3", "chat", "train", (4, 3), (False, False), 2, 0, "given", cut_tokens=11),
]


def test_prompts_come_back_in_their_order(tmp_path: Path) -> None:
    records.write_prompts(tmp_path, PROMPTS)
    assert records.read_prompts(tmp_path) == PROMPTS


def test_responses_come_back_by_split(tmp_path: Path) -> None:
    records.write_responses(tmp_path, RESPONSES)
    r1, r2, r3 = RESPONSES
    assert records.read_responses(tmp_path, "train") == [r1, r3]
    assert records.read_responses(tmp_path, "val") == []
    assert records.read_responses(tmp_path, "eval") == [r2]
    assert records.read_responses(tmp_path) == [r1, r3, r2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "responses-eval.parquet", "responses-train.parquet", "responses-val.parquet",
    ]  # fmt: skip


def test_what_is_not_there_or_damaged_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"prompts.parquet is missing"):
        records.read_prompts(tmp_path)
    records.write_responses(tmp_path, RESPONSES)
    path = records.response_file(tmp_path, "train")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EagleError, match=r"responses-train.parquet is not a whole Parquet file"):
        records.read_responses(tmp_path, "train")


def test_other_columns_or_types_are_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"]}), records.response_file(tmp_path, "train"))
    with pytest.raises(EagleError, match=r"has the columns \['id'\], not \['id', 'category'"):
        records.read_responses(tmp_path, "train")
    table = records.response_table(RESPONSES)
    wide = table.set_column(5, "prompt_tokens", table["prompt_tokens"].cast(pa.int64()))
    pq.write_table(wide.select(table.column_names), records.response_file(tmp_path, "train"))
    with pytest.raises(EagleError, match="other types"):
        records.read_responses(tmp_path, "train")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write_prompts(tmp_path, PROMPTS)

    def half(table: pa.Table, path: Path, **_: object) -> None:
        path.write_bytes(b"PAR1 half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(records.pq, "write_table", half)
    with pytest.raises(KeyboardInterrupt):
        records.write_prompts(tmp_path, PROMPTS[:1])
    assert records.read_prompts(tmp_path) == PROMPTS
