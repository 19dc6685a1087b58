"""What an artifact says of itself: how it was made, from what, with what, and what lies in it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from eagle3x.provenance import GitRevision
from eagle3x.types import EagleError

SCHEMA_VERSION = 1
MASKED = "***"

ALWAYS_SECRET = frozenset(("secret", "secrets", "password", "passwords", "passwd", "passphrase", "credentials"))
ACCESS = frozenset(("api", "hf", "hub", "auth", "access", "bearer", "refresh", "github", "wandb", "huggingface"))
TEXT_TOKENS = frozenset(
    ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "image", "audio", "video", "start", "end", "stop", "bonus",
     "first", "last", "next", "per", "think")
)  # fmt: skip
"""`eos_token` and its like are text; any other name that ends in `_token` is taken for a credential."""
URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+(?=@)")
INLINE = re.compile(r"(?i)((?:api[-_]?key|access[-_]?key|\btoken|_token|-token|password|secret)=)[^\s&,;'\"]+")


@dataclass(frozen=True)
class FileRecord:
    """One file of an artifact."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`ended` is None, and `files` and `facts` are empty, while the artifact is not finished.

    `wall_seconds`: work over all attempts, killed ones included. `parents`: stage to key. `config`: the resolved config
    of the run that made it, with secrets masked. `facts`: what the maker says of its result (tokens, counts, ...).
    Times are ISO 8601, UTC.
    """

    schema_version: int
    stage: str
    key: str
    version: int
    identity: dict[str, Any]
    parents: dict[str, str]
    config: dict[str, Any]
    packages: dict[str, str]
    python: str
    git: GitRevision | None
    host: dict[str, Any]
    started: str
    ended: str | None
    wall_seconds: float
    facts: dict[str, Any]
    files: dict[str, FileRecord]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())

    def write(self, path: Path) -> None:
        """Replace `path` in one step, so that no reader ever sees half a manifest; it is on the disk on return."""
        new = path.with_name(f".{path.name}.new")
        with new.open("w") as stream:
            json.dump(dataclasses.asdict(self), stream, indent=2, allow_nan=False)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
        sync_directory(path.parent)

    @staticmethod
    def read(path: Path) -> Manifest:
        """FileNotFoundError if there is none; EagleError if it cannot be understood."""
        try:
            values = json.loads(path.read_bytes())
            if values["schema_version"] != SCHEMA_VERSION:
                raise EagleError(
                    f"{path} has schema version {values['schema_version']}, this eagle3x reads {SCHEMA_VERSION}:"
                    " use another artifact store (artifacts=...), or the eagle3x that wrote it"
                )
            values["files"] = {name: FileRecord(**file) for name, file in values["files"].items()}
            values["git"] = values["git"] and GitRevision(**values["git"])
            return Manifest(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EagleError(f"{path} is not a manifest ({type(error).__name__}: {error})") from error


def plain(value: Any) -> Any:
    """As JSON values: dataclasses and mappings become dicts, tuples lists, paths strings. TypeError for the rest."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a manifest holds JSON values, not {type(value).__name__}: {value!r}")


def masked(value: Any) -> Any:
    """A copy of JSON values without secrets: values of names like api_key, hf_token, password, and those in URLs."""
    if isinstance(value, dict):
        return {k: MASKED if v is not None and _is_secret(k, v) else masked(v) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(v) for v in value]
    if isinstance(value, str):
        return INLINE.sub(rf"\g<1>{MASKED}", URL_PASSWORD.sub(MASKED, value))
    return value


def _is_secret(name: str, value: Any) -> bool:
    """By the words of the name. Counts and switches (`num_key_value_heads`, `use_auth_token: true`) are none."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    if ALWAYS_SECRET & set(words):
        return not isinstance(value, bool)
    if isinstance(value, bool | int | float) or not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in TEXT_TOKENS
    if words[-1] == "tokens":
        return before in ACCESS
    return any(word.endswith(("key", "keys")) for word in words)


def sync_directory(path: Path) -> None:
    """Put a directory's names on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def facts_of(stage: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage's maker returned, as plain JSON values. EagleError if it cannot be."""
    try:
        values = plain(facts)
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EagleError(f"the maker of {stage} returned facts that no JSON can hold: {error}") from error
    return values
