from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3x.reporting.cell import load_cells, save_cell, write_atomically
from eagle3x.types import EagleError


def test_a_cell_comes_back_as_it_was(make_cell: Any, tmp_path: Path) -> None:
    cell = make_cell(overrides=("seed=2",))
    save_cell(cell, tmp_path / "sweep" / "0")
    assert load_cells(tmp_path / "sweep") == [cell]


def test_a_failed_cell_keeps_its_error_without_credentials(failed_cell: Any, tmp_path: Path) -> None:
    save_cell(replace(failed_cell, error="401: api_key=sesame"), tmp_path / "sweep" / "0")
    (back,) = load_cells(tmp_path / "sweep")
    assert back.error == "401: api_key=***"
    assert back.benchmark_dir is None


def test_relative_artifacts_are_found_from_anywhere(
    failed_cell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_cell(replace(failed_cell, benchmark_dir=Path("outputs/benchmark")), Path("sweep/0"))
    monkeypatch.chdir("/")
    (back,) = load_cells(tmp_path / "sweep")
    assert back.benchmark_dir == tmp_path / "outputs" / "benchmark"


def test_jobs_come_in_the_order_of_their_numbers(failed_cell: Any, tmp_path: Path) -> None:
    for number in (10, 9, 0, 2):
        save_cell(replace(failed_cell, name=str(number)), tmp_path / str(number))
    save_cell(replace(failed_cell, name="not a job"), tmp_path)
    assert [c.name for c in load_cells(tmp_path)] == ["0", "2", "9", "10"]


def test_no_record_is_no_cell(tmp_path: Path) -> None:
    assert load_cells(tmp_path) == []


def test_another_version_is_refused(failed_cell: Any, tmp_path: Path) -> None:
    save_cell(failed_cell, tmp_path / "0")
    record = json.loads((tmp_path / "0" / "cell_record.json").read_text())
    (tmp_path / "0" / "cell_record.json").write_text(json.dumps(record | {"record_version": 99}))
    with pytest.raises(EagleError, match="version 99"):
        load_cells(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "summary.json"
    write_atomically(file, "old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
