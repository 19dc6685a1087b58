"""Responses on disk as they come, so that a killed run goes on with what is missing. No torch here."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.compute as pc

from eagle3x.data.records import RESPONSE_SCHEMA, from_table, read_table, response_file, response_table, write_table
from eagle3x.types import Response, Split

FLUSH_SECONDS = 20.0
"""A kill loses at most what came in this time, and at most `rows_per_part` responses."""


class ResponseParts:
    """Small Parquet files in `work/parts/`, each written at once or not at all; `merge` makes the final files of them.

    Parts go only when all final files are there, so at every moment each finished response is in one or the other.
    """

    def __init__(self, work: Path, rows_per_part: int) -> None:
        self._work = work
        self._directory = work / "parts"
        self._directory.mkdir(exist_ok=True)
        self._rows_per_part = rows_per_part
        self._waiting: list[Response] = []
        self._last_flush = time.monotonic()
        self._next = 1 + max((int(p.stem) for p in self._directory.glob("*.parquet")), default=-1)

    def done_ids(self) -> set[str]:
        """Ids of the responses that are on disk."""
        return {id for path in self._files() for id in read_table(path, RESPONSE_SCHEMA, ["id"])["id"].to_pylist()}

    def responses(self, ids: Collection[str]) -> dict[str, Response]:
        """Those of these responses that are on disk, by id."""
        wanted = pc.field("id").isin(pa.array(list(ids), pa.string()))
        tables = (read_table(path, RESPONSE_SCHEMA).filter(wanted) for path in self._files())
        return {response.id: response for table in tables for response in from_table(table)}

    def add(self, response: Response) -> None:
        """Keep a response; it is on disk after `rows_per_part` of them, or when `FLUSH_SECONDS` are over."""
        self._waiting.append(response)
        if len(self._waiting) >= self._rows_per_part or time.monotonic() - self._last_flush > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            write_table(response_table(self._waiting), self._directory / f"{self._next:06d}.parquet")
            self._next += 1
            self._waiting = []
        self._last_flush = time.monotonic()

    def drop(self) -> None:
        """Remove what is on disk, once another file holds it."""
        shutil.rmtree(self._directory)

    def merge(self, order: Mapping[str, int]) -> pa.Table:
        """Write one file per split, rows by `order` (id to place), and drop the parts.

        Responses without a label (`response_tokens` = 0) go into no file. Returns all rows, those without a label too.
        """
        self.flush()
        tables = (read_table(path, RESPONSE_SCHEMA) for path in self._files())
        table = pa.concat_tables([RESPONSE_SCHEMA.empty_table(), *tables])
        # A run that was killed between the final files and the end of the parts left both.
        row_of = {id: row for row, id in enumerate(table["id"].to_pylist())}
        table = table.take(pa.array([row_of[id] for id in sorted(row_of, key=order.__getitem__)], pa.int64()))
        labelled = table.filter(pc.field("response_tokens") > 0)
        for split in get_args(Split):
            write_table(labelled.filter(pc.field("split") == split), response_file(self._work, split))
        self.drop()
        return table

    def _files(self) -> list[Path]:
        return sorted([*self._directory.glob("*.parquet"), *self._work.glob("responses-*.parquet")])
