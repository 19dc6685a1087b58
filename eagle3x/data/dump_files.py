"""The files of a dump of hidden states, and what they say of it before any state is read. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle3x.data.shard_index import INDEX, read_spec
from eagle3x.types import ConfigError, EagleError

DumpFormat = Literal["eagle3x", "vllm", "specforge", "modelopt"]
SUFFIXES: dict[str, DumpFormat] = {
    ".safetensors": "vllm", ".ckpt": "specforge", ".ckpt.gz": "specforge", ".pt": "modelopt",
}  # fmt: skip
VLLM = ("token_ids", "hidden_states")
"""Tensors of a file of vLLM's."""
SAVED_BY_TORCH = (b"PK", b"\x80", b"\x1f\x8b")
"""How files of torch.save begin: a zip, an old one's pickle, either in gzip."""


@dataclass(frozen=True)
class DumpFiles:
    """format: of all files. indices: of our own shards, in which the samples are; else `files` has one a sample."""

    format: DumpFormat
    indices: tuple[Path, ...]
    files: tuple[Path, ...]


def find(directory: Path) -> DumpFiles:
    """What lies below the directory. EagleError if it holds no dump, or dumps of two formats."""
    below = sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []
    indices = tuple(path for path in below if path.name == INDEX)
    if indices:
        return DumpFiles("eagle3x", indices, ())
    found: dict[Path, DumpFormat] = {path: SUFFIXES[suffix(path)] for path in below if suffix(path) in SUFFIXES}
    formats: list[DumpFormat] = sorted(set(found.values()))
    if len(formats) != 1:
        what = f"files of {' and '.join(formats)}" if formats else f"no {', '.join(SUFFIXES)} file"
        raise EagleError(f"{directory} has {what}: name the folder of one dump of hidden states")
    return DumpFiles(formats[0], (), tuple(found))


def suffix(path: Path) -> str:
    """The end of a file's name that says its format."""
    return ".ckpt.gz" if path.name.endswith(".ckpt.gz") else path.suffix


def check(source: str | None) -> None:
    """Whether hidden_states.from names a dump: ConfigError. Reads names alone."""
    if source is None:
        return
    if not Path(source).is_dir():
        raise ConfigError(f"hidden_states.from={source}: no such directory")
    try:
        find(Path(source))
    except EagleError as error:
        raise ConfigError(f"hidden_states.from={source}: {error}") from error


def unusable(source: str, hidden_size: int, boundaries: Sequence[int], has_texts: bool) -> list[str]:
    """Why the dump cannot be trained on, as far as its first file and its indices say; the probe looks at the states.

    hidden_size: of the target. boundaries: of the config. has_texts: whether responses.from gives texts with masks.
    """
    named = f"hidden_states.from={source}"
    try:
        dump = find(Path(source))
        if dump.format == "eagle3x":
            found = [(index, read_spec(index.parent)) for index in dump.indices]
            wrong = [f"{named}: {index} has boundaries {list(spec.boundaries)}, the config says {list(boundaries)}"
                     for index, spec in found if list(spec.boundaries) != list(boundaries)]  # fmt: skip
            wrong += [f"{named}: {index} has states {spec.hidden_size} wide, the target's are {hidden_size}"
                      for index, spec in found if spec.hidden_size != hidden_size]  # fmt: skip
            return wrong
        first = dump.files[0]
        if dump.format != "vllm":
            with first.open("rb") as file:
                known = file.read(2).startswith(SAVED_BY_TORCH)
            return [] if known else [f"{named}: {first} is no file of torch.save"]
        reasons = _states_unlike(first, hidden_size, len(boundaries))
        if not has_texts:
            reasons.append(
                "files of this format have no loss masks: name the texts that the dump was made from,"
                " responses.from=FILE (for speculators the folder of its prepared data)"
            )
        return [f"{named}: {reason}" for reason in reasons]
    except (OSError, EagleError) as error:
        return [f"{named}: {error}"]


def _states_unlike(file: Path, hidden_size: int, num_aux: int) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            missing = [name for name in VLLM if name not in tensors.keys()]  # noqa: SIM118 (it is no mapping)
            if missing:
                return [f"{file} has no tensor {', '.join(missing)}; it holds {', '.join(tensors.keys())}"]
            shape = list(tensors.get_slice("hidden_states").get_shape())
    except SafetensorError as error:
        return [f"{file} is not a whole safetensors file: {error}"]
    if len(shape) != 3 or shape[1:] != [num_aux + 1, hidden_size]:
        return [
            f"{file} has hidden_states {shape}, should be [tokens, {num_aux + 1}, {hidden_size}]: {num_aux} boundaries"
            " and the last state of the target"
        ]
    return []
