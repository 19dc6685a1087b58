"""Text that is there already: every kind of file, what is cut or left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3x.data import records, reuse
from eagle3x.types import ConfigError, EagleError, Response

ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 0]},
    {"input_ids": [5, 9, 7, 8, 9, 1], "loss_mask": [0, 1, 0, 1, 1, 1]},
    {"input_ids": [4, 4, 4], "loss_mask": [0, 0, 0]},
]
WANTED = [
    Response("row-0", "uncategorised", "train", (5, 6, 7, 8), (False, False, True, True), 2, 2, "given"),
    Response("row-1", "uncategorised", "train", (5, 9, 7, 8, 9), (False, True, False, True, True), 1, 4, "given", 1),
    Response("row-2", "uncategorised", "train", (), (), 0, 0, "given"),
]
"""Up to five tokens; what follows the last label is no text of the target, and is not counted as cut."""


def parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path / "a.parquet")
    return path / "a.parquet"


def jsonl(path: Path) -> Path:
    (path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path / "a.jsonl"


def datasets_folder(path: Path) -> Path:
    """As datasets' save_to_disk leaves it: streams of record batches, and JSON files beside them."""
    (path / "prepared").mkdir()
    table = pa.Table.from_pylist([{**row, "seq_len": len(row["input_ids"])} for row in ROWS])
    for number, part in enumerate((table.slice(0, 2), table.slice(2))):
        with pa.ipc.new_stream(str(path / "prepared" / f"data-{number:05}-of-00002.arrow"), table.schema) as stream:
            stream.write_table(part)
    (path / "prepared" / "state.json").write_text("{}")
    return path / "prepared"


@pytest.mark.parametrize("write", [parquet, jsonl, datasets_folder])
def test_every_kind_of_file(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path)
    reuse.check(str(path))
    assert list(reuse.read(path, 128, 5)) == WANTED
    assert len(str(reuse.fingerprint(str(path)))) == 64


def test_our_own_responses_come_back(tmp_path: Path) -> None:
    own = Response("x", "math", "train", (5, 6, 7), (False, True, True), 1, 2, "stop")
    records.write_responses(tmp_path, [own])
    [again] = reuse.read(tmp_path / "responses-train.parquet", 128, 100)
    assert again == Response("x", "math", "train", (5, 6, 7), (False, True, True), 1, 2, "given")


BAD = {
    "no mask": ({"input_ids": [1]}, "row 0 has no loss_mask"),
    "no tokens": ({"text": "a", "loss_mask": [1]}, "row 0 has no token_ids or input_ids: it has text, loss_mask"),
    "lengths": ({"input_ids": [1, 2], "loss_mask": [1]}, "2 tokens and a mask of 1"),
    "another target's": (
        {"input_ids": [1, 500], "loss_mask": [1, 1]},
        "token ids are 1 to 500, the target has 0 to 127",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_rows_are_named(fault: str, tmp_path: Path) -> None:
    row, message = BAD[fault]
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(EagleError, match=message):
        list(reuse.read(tmp_path / "a.jsonl", 128, 100))


def test_bad_files_are_named(tmp_path: Path) -> None:
    for name in ("nothing.parquet", "."):
        with pytest.raises(ConfigError, match="no such file"):
            reuse.check(str(tmp_path / name))
    (tmp_path / "a.parquet").write_bytes(b"PAR")
    with pytest.raises(EagleError, match=r"a\.parquet cannot be read"):
        list(reuse.read(tmp_path / "a.parquet", 128, 100))
    (tmp_path / "a.jsonl").write_text(json.dumps({**ROWS[0], "id": "x"}) + "\n" + json.dumps({**ROWS[1], "id": "x"}))
    with pytest.raises(EagleError, match="row 1: id 'x' is there twice"):
        list(reuse.read(tmp_path / "a.jsonl", 128, 100))
