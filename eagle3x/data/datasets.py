"""Datasets of the hub or of a directory, read by the library `datasets` into a JSONL file of records. No torch here.

The file lies in the user's cache, named by what was read: the commit (or the directory's content), subset, split, rows
and columns. From there on it is a prompt file like any other, and its content is the identity of the prompts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3x import hub
from eagle3x.data.config import COLUMNS, PromptSource
from eagle3x.fingerprint import cache_dir, fingerprint_directory
from eagle3x.identity import digest
from eagle3x.progress import log
from eagle3x.types import ConfigError

COMMIT = re.compile("[0-9a-f]{40}")
OLDEST = (5, 2)
"""The version that was seen to read `hf://` as the hub alone, and that runs no code of a dataset's."""
SAVED = ("dataset_info.json", "dataset_dict.json")
"""What `save_to_disk` leaves in a dataset's folder."""


@dataclass(frozen=True)
class Rows:
    """Records as JSONL, and where they are from."""

    path: Path
    origin: dict[str, Any]


def check(source: PromptSource, group: str) -> None:
    """Whether the dataset can be asked for, without the network.

    Raises:
        ConfigError: `datasets` is not installed, no such directory, or no name of a repository.
    """
    try:
        found = version("datasets")
    except PackageNotFoundError:
        raise ConfigError(f"{group}=hf needs the library datasets: pip install 'eagle3x[hf]'") from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ConfigError(f"{group}=hf needs datasets {needed} or newer, not {found}: pip install 'datasets>={needed}'")
    if source.path is not None and not Path(source.path).is_dir():
        raise ConfigError(f"{group}.path={source.path}: no such directory; a file is read by {group}=jsonl")
    if source.hub_id is not None and not hub.is_hub_id(source.hub_id):
        raise ConfigError(f"{group}.hub_id={source.hub_id!r} is no dataset of the hub (as org/name would be)")


def rows_of(source: PromptSource) -> Rows:
    """The dataset's rows as records; read once, then found in the cache.

    Raises:
        ConfigError: no such dataset, subset, split or column.
        EagleError: the hub cannot be reached.
    """
    if source.path is not None:
        return _read(source, {"content": fingerprint_directory(Path(source.path))}, {})
    pinned = source.revision if COMMIT.fullmatch(source.revision or "") else None
    if pinned is not None and _file(source, _at(source, pinned)).exists():
        return _read(source, _at(source, pinned), {})  # asks no network
    found = hub.dataset(str(source.hub_id), source.revision)
    return _read(source, _at(source, found.commit), {"licence": found.licence})


def _at(source: PromptSource, commit: str) -> dict[str, Any]:
    return {"hub_id": source.hub_id, "revision": commit}


def _file(source: PromptSource, place: Mapping[str, Any]) -> Path:
    return cache_dir() / "datasets" / f"{digest({**place, **_asked(source)})}.jsonl"


def _asked(source: PromptSource) -> dict[str, Any]:
    return {"subset": source.subset, "split": source.split, "rows": source.rows, "columns": dict(source.columns)}


def _read(source: PromptSource, place: Mapping[str, Any], more: Mapping[str, Any]) -> Rows:
    """From the cache, or from `place` into it. The records appear last: where they are, their origin is too."""
    path = _file(source, place)
    about = path.with_suffix(".json")
    if not path.exists():
        log(f"prompts: reading {source.hub_id or source.path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        about.write_text(json.dumps({**place, **more, **_asked(source)}))
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(_lines(_load(source, place), source))
        partial.replace(path)
    return Rows(path, json.loads(about.read_text()))


def _load(source: PromptSource, place: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    from datasets.exceptions import DatasetsError

    library: Any = import_module("datasets")  # whose annotations know neither a flag for streaming nor rows
    try:
        if source.path is not None and any((Path(source.path) / name).is_file() for name in SAVED):
            saved = library.load_from_disk(source.path)
            if not isinstance(saved, library.DatasetDict):
                return saved
            if source.split not in saved:
                raise ConfigError(f"{source.path} has no split {source.split!r}; it has {', '.join(saved)}")
            return saved[source.split]
        return library.load_dataset(
            # A bare id would mean a folder of that name, if there is one.
            source.path or f"hf://datasets/{source.hub_id}",
            name=source.subset,
            split=source.split,
            revision=place.get("revision"),
            streaming=source.rows is not None,
        )
    except (OSError, ValueError, DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{source.hub_id or source.path} cannot be read: {reason}") from error


def _lines(rows: Iterable[Mapping[str, Any]], source: PromptSource) -> Iterable[str]:
    """One JSON object a row, with our keys. A value that the row has not (None) is left out."""
    for number, row in enumerate(islice(rows, source.rows), 1):
        where = f"{source.hub_id or source.path}:{number}"
        columns = source.columns or {name: name for name in COLUMNS if name in row}
        missing = [column for column in columns.values() if column not in row]
        if missing or not columns:
            raise ConfigError(
                f"{where} has no column {' and '.join(missing) or ' or '.join(COLUMNS)}; it has {', '.join(row)}:"
                " say which is which by columns, as in +data.columns.prompt=question"
            )
        try:
            yield json.dumps({ours: row[theirs] for ours, theirs in columns.items() if row[theirs] is not None}) + "\n"
        except TypeError as error:
            raise ConfigError(f"{where}: {error}; columns of texts and messages are right") from error
