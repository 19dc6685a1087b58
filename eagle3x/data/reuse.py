"""Train text that is there already, as token ids with loss masks: `responses.from=FILE`. No torch here.

| what | columns or keys |
| --- | --- |
| `*.parquet` (such as our own) | `token_ids` or `input_ids`, `loss_mask`; `id` and `category` if there are any |
| `*.jsonl` | the same keys, one object a line |
| a folder with `*.arrow` (datasets' save_to_disk: speculators' prepared data) | the same columns |

A mask says of each token whether the target wrote it; it is taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3x.data.sources import NO_CATEGORY
from eagle3x.fingerprint import fingerprint_file, fingerprint_files
from eagle3x.types import ConfigError, EagleError, Response

TOKENS = ("token_ids", "input_ids")


def check(path: str | None) -> None:
    """Whether the file is there and of a kind that is read: ConfigError. Reads nothing."""
    if path is not None and not _files(Path(path)):
        raise ConfigError(
            f"responses.from={path}: no such file, or none of *.parquet, *.jsonl and folders with *.arrow files"
        )


def fingerprint(path: str | None) -> str | None:
    """Its content, wherever it lies."""
    if path is None:
        return None
    root, files = Path(path), _files(Path(path))
    return fingerprint_files(files, root) if root.is_dir() else fingerprint_file(root)


def read(path: Path, vocab_size: int, max_tokens: int) -> Iterator[Response]:
    """The train responses in `path`.

    What follows the last label is left out; what is beyond `max_tokens` is cut and counted.
    Raises EagleError naming the row that has no tokens, no mask of the same length, or ids that the target has not.
    """
    ids: set[str] = set()
    for number, row in enumerate(_rows(path)):
        where = f"{path} row {number}"
        response = _response(row, where, number, vocab_size, max_tokens)
        if response.id in ids:
            raise EagleError(f"{where}: id {response.id!r} is there twice")
        ids.add(response.id)
        yield response


def labelled(
    id: str, category: str, tokens: Sequence[int], mask: Sequence[bool], max_tokens: int | None = None
) -> Response:
    """A train response of these tokens; an empty mask where no label is left."""
    last = max((i for i, label in enumerate(mask) if label), default=-1)
    whole = last + 1
    kept = whole if max_tokens is None else min(whole, max_tokens)
    mask = tuple(bool(label) for label in mask[:kept])
    first = mask.index(True) if True in mask else kept
    return Response(id, category, "train", tuple(tokens[:kept]), mask, first, kept - first, "given", whole - kept)


def _response(row: Mapping[str, Any], where: str, number: int, vocab_size: int, max_tokens: int) -> Response:
    tokens = next((row[name] for name in TOKENS if row.get(name) is not None), None)
    mask = row.get("loss_mask")
    if tokens is None or mask is None:
        missing = " or ".join(TOKENS) if tokens is None else "loss_mask"
        raise EagleError(f"{where} has no {missing}: it has {', '.join(row)}")
    if len(tokens) != len(mask) or not tokens:
        raise EagleError(f"{where} has {len(tokens)} tokens and a mask of {len(mask)}")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise EagleError(f"{where}: token ids are {min(tokens)} to {max(tokens)}, the target has 0 to {vocab_size - 1}")
    return labelled(str(row.get("id") or f"row-{number}"), row.get("category") or NO_CATEGORY, tokens, mask, max_tokens)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.arrow"))
    return [path] if path.is_file() and path.suffix in (".parquet", ".jsonl") else []


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in _files(path):
        try:
            if file.suffix == ".jsonl":
                with file.open("rb") as lines:
                    yield from (json.loads(line) for line in lines if line.strip())
                continue
            if file.suffix == ".parquet":
                batches: Iterable[pa.RecordBatch] = pq.ParquetFile(file).iter_batches(1024)
            else:
                batches = pa.ipc.open_stream(pa.memory_map(str(file)))
            for batch in batches:
                kept = [name for name in (*TOKENS, "loss_mask", "id", "category") if name in batch.schema.names]
                yield from batch.select(kept).to_pylist()
        except (pa.ArrowInvalid, ValueError) as error:
            raise EagleError(f"{file} cannot be read: {error}") from error
