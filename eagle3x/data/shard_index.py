"""The index of a directory of shards: which tensors they hold, where each sample lies, what each shard must be."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3x.types import EagleError, LastNorm

SCHEMA = 1
INDEX = "index.json"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOKEN_BYTES = 8 + 1
"""token_ids and loss_mask."""


@dataclass(frozen=True)
class ShardSpec:
    """What the tensors of a directory of shards are."""

    boundaries: tuple[int, ...]
    hidden_size: int
    dtype: str
    last_norm: LastNorm

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype} of the states must be one of {', '.join(DTYPE_BYTES)}")

    @property
    def bytes_per_token(self) -> int:
        """On disk: states of all columns, token id and mask."""
        return (len(self.boundaries) + 1) * self.hidden_size * DTYPE_BYTES[self.dtype] + TOKEN_BYTES

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the states of a token: its boundaries, then `last`."""
        return (*(f"boundary {b}" for b in self.boundaries), "last")


@dataclass(frozen=True)
class SampleEntry:
    """Where a sample lies: rows `start` to `start + length` of shard number `shard`."""

    id: str
    category: str
    shard: int
    start: int
    length: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class ShardEntry:
    """A shard as it was written. `mean_norms`: mean L2 norm of a token's state, per boundary and of `last`."""

    file: str
    sha256: str
    bytes: int
    tokens: int
    mean_norms: tuple[float, ...]


def index_of(spec: ShardSpec, shards: list[ShardEntry], samples: list[SampleEntry]) -> dict[str, Any]:
    """The content of index.json, or of the part of it that one shard brings."""
    return {
        "schema": SCHEMA,
        "spec": asdict(spec),
        "shards": [asdict(shard) for shard in shards],
        "samples": [asdict(sample) for sample in samples],
    }


def read_spec(directory: Path) -> ShardSpec:
    """The spec that index.json names."""
    index = _read_json(directory / INDEX)
    try:
        spec = index["spec"]
        return ShardSpec(tuple(spec["boundaries"]), spec["hidden_size"], spec["dtype"], spec["last_norm"])
    except (KeyError, TypeError, ValueError) as error:
        raise EagleError(f"{directory / INDEX} is no index of hidden states: {error!r}") from error


def read_index(directory: Path, spec: ShardSpec) -> tuple[list[ShardEntry], list[SampleEntry]]:
    """The checked content of index.json."""
    shards, samples = _entries(directory / INDEX, spec)
    _check(directory, shards, samples)
    return shards, samples


def read_parts(directory: Path, spec: ShardSpec) -> tuple[list[ShardEntry], list[SampleEntry]]:
    """What an unfinished writer left: its shards that are complete."""
    shards: list[ShardEntry] = []
    samples: list[SampleEntry] = []
    for part in sorted(directory.glob("shard-*.json")):
        s, p = _entries(part, spec)
        shards += s
        samples += p
    _check(directory, shards, samples)
    return shards, samples


def _entries(file: Path, spec: ShardSpec) -> tuple[list[ShardEntry], list[SampleEntry]]:
    index = _read_json(file)
    if index.get("schema") != SCHEMA or index.get("spec") != json.loads(json.dumps(asdict(spec))):
        raise EagleError(
            f"{file} was written for {index.get('spec')} (schema {index.get('schema')}), not {asdict(spec)} (schema"
            f" {SCHEMA}): remove the directory to write it anew"
        )
    try:
        shards = [ShardEntry(**{**s, "mean_norms": tuple(s["mean_norms"])}) for s in index["shards"]]
        return shards, [SampleEntry(**s) for s in index["samples"]]
    except (KeyError, TypeError) as error:
        raise EagleError(f"{file} is no index of hidden states: {error!r}") from error


def _check(directory: Path, shards: list[ShardEntry], samples: list[SampleEntry]) -> None:
    """Every shard is there in its size, and the samples fill each shard without gap or overlap."""
    filled = [0] * len(shards)
    for sample in samples:
        if not 0 <= sample.shard < len(shards) or sample.start != filled[sample.shard]:
            raise EagleError(f"{directory / INDEX}: sample {sample.id} does not lie where the one before it ends")
        filled[sample.shard] += sample.length
    for number, (shard, tokens) in enumerate(zip(shards, filled, strict=True)):
        file = directory / shard.file
        if shard.file != f"shard-{number:05}.safetensors" or tokens != shard.tokens:
            raise EagleError(
                f"{directory / INDEX}: {shard.file} is shard {number} of {shard.tokens} tokens, not {tokens}"
            )
        if not file.is_file() or file.stat().st_size != shard.bytes:
            size = file.stat().st_size if file.is_file() else "no"
            raise EagleError(
                f"{file} has {size} bytes, its index says {shard.bytes}: it was changed or not copied whole"
            )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise EagleError(f"cannot read {file}, the index of hidden states: {error}") from error


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write `file` in one step."""
    new = file.with_suffix(".json-new")
    new.write_text(json.dumps(value, separators=(",", ":"), allow_nan=False))
    sync(new)
    publish(new, file)


def sync(file: Path) -> None:
    """Wait until what was written is on disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def publish(new: Path, file: Path) -> None:
    """Rename to its name what is wholly on disk: there is no moment at which `file` is half written."""
    new.replace(file)


def sha256(file: Path) -> str:
    """Of the file's bytes, hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
