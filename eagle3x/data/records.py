"""Prompts and responses on disk: Parquet, one row each. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3x.types import EagleError, Message, Prompt, Response, Split

PROMPTS_FILE = "prompts.parquet"
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
PROMPT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("category", pa.string()),
        ("split", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("follow_ups", pa.list_(pa.string())),
    ]
)
RESPONSE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("category", pa.string()),
        ("split", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("finish", pa.string()),
        ("cut_tokens", pa.int32()),
    ]
)


def write_prompts(directory: Path, prompts: Sequence[Prompt]) -> None:
    """Write `prompts.parquet`, in the order given."""
    rows = [
        {
            "id": p.id,
            "category": p.category,
            "split": p.split,
            "messages": [{"role": m.role, "content": m.content} for m in p.messages],
            "follow_ups": list(p.follow_ups),
        }
        for p in prompts
    ]
    write_table(pa.Table.from_pylist(rows, PROMPT_SCHEMA), directory / PROMPTS_FILE)


def read_prompts(directory: Path) -> list[Prompt]:
    """The prompts of a prompts artifact, in their order."""
    rows = read_table(directory / PROMPTS_FILE, PROMPT_SCHEMA).to_pylist()
    return [
        Prompt(
            r["id"],
            r["category"],
            r["split"],
            tuple(Message(m["role"], m["content"]) for m in r["messages"]),
            tuple(r["follow_ups"]),
        )
        for r in rows
    ]


def response_file(directory: Path, split: Split) -> Path:
    """Where the responses of a split are."""
    return directory / f"responses-{split}.parquet"


def response_table(responses: Iterable[Response]) -> pa.Table:
    """Responses as rows of `RESPONSE_SCHEMA`."""
    return pa.Table.from_pylist([_row(r) for r in responses], RESPONSE_SCHEMA)


def write_responses(directory: Path, responses: Sequence[Response]) -> None:
    """Write one file per split, each in the order given; a split without responses gets an empty file."""
    for split in get_args(Split):
        table = response_table(r for r in responses if r.split == split)
        write_table(table, response_file(directory, split))


def read_responses(directory: Path, split: Split | None = None) -> list[Response]:
    """The responses of a split, or of train, val and eval in this order."""
    splits: tuple[Split, ...] = get_args(Split) if split is None else (split,)
    return [r for s in splits for r in from_table(read_table(response_file(directory, s), RESPONSE_SCHEMA))]


def from_table(table: pa.Table) -> list[Response]:
    """The rows of `RESPONSE_SCHEMA` as responses."""
    rows = table.to_pylist()
    return [Response(**{**r, "token_ids": tuple(r["token_ids"]), "loss_mask": tuple(r["loss_mask"])}) for r in rows]


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file at once or not at all: a kill leaves no half of it under its name."""
    partial = path.with_name(path.name + ".partial")
    pq.write_table(table, partial, compression="zstd")
    with partial.open("rb") as f:
        os.fsync(f.fileno())
    partial.replace(path)


def read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file of exactly this schema.

    Raises:
        EagleError: the file is missing, is not Parquet, or has other columns.
    """
    try:
        found = pq.read_schema(path)
        if not found.equals(schema):
            names = f"{found.names}, not {schema.names}" if found.names != schema.names else f"other types: {found}"
            raise EagleError(f"{path} has the columns {names}; drop it (command=artifacts action=drop), run again")
        return pq.ParquetFile(path).read(columns=list(columns) if columns else None)
    except FileNotFoundError as e:
        raise EagleError(f"{path} is missing; drop the artifact (command=artifacts action=drop) and run again") from e
    except pa.ArrowInvalid as e:
        raise EagleError(f"{path} is not a whole Parquet file ({e}); drop it (command=artifacts action=drop)") from e


def _row(r: Response) -> dict[str, Any]:
    return {
        "id": r.id,
        "category": r.category,
        "split": r.split,
        "token_ids": r.token_ids,
        "loss_mask": r.loss_mask,
        "prompt_tokens": r.prompt_tokens,
        "response_tokens": r.response_tokens,
        "finish": r.finish,
        "cut_tokens": r.cut_tokens,
    }
