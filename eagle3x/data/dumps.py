"""Hidden states that other tools extracted, as they lie on disk. What their columns are, only the probe can say.

| format | files | a file holds |
| --- | --- | --- |
| `eagle3x` | index.json and shards | our own |
| `vllm`, speculators' too | `*.safetensors` | token_ids [T], hidden_states [T, A+1, H] (and _scales if fp8) |
| `specforge` | `*.ckpt`, `*.ckpt.gz` | input_ids, loss_mask [T], aux_hidden_state [1, T, A*H], hidden_state [1, T, H] |
| `modelopt` | `*.pt` | input_ids, loss_mask [T], aux_hidden_states [T, A*H], hidden_states [T, H] |

Pickles are read as tensors alone (`weights_only`). Shapes: T tokens, A boundaries, H hidden size of the target.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3x.data.dump_files import VLLM, find, suffix
from eagle3x.data.shards import Shards
from eagle3x.types import EagleError

SCALES = "hidden_states_scales"
PICKLED = {"specforge": ("aux_hidden_state", "hidden_state"), "modelopt": ("aux_hidden_states", "hidden_states")}
"""Names of the boundaries' and of the last states."""


@dataclass(frozen=True)
class DumpSample:
    """One sample: token_ids [T]; aux [T, A*H] and last [T, H] in the dump's dtype; loss_mask [T] if it has one."""

    id: str
    token_ids: Tensor
    aux: Tensor
    last: Tensor
    loss_mask: Tensor | None


class Dump(Sequence[DumpSample]):
    """The samples of a dump, by file name. Nothing is read before it is asked for."""

    def __init__(self, directory: Path, hidden_size: int) -> None:
        """EagleError if the directory holds no dump, or dumps of two formats."""
        self.directory, self.hidden_size = directory, hidden_size
        self._shards: list[Shards] = []
        found = find(directory)
        self.format, self.files = found.format, list(found.files)
        if found.indices:
            self._shards = [Shards(index.parent) for index in found.indices]
            self.files = [shards.directory / shard.file for shards in self._shards for shard in shards.shards]

    def __len__(self) -> int:
        return sum(map(len, self._shards)) if self._shards else len(self.files)

    def __getitem__(self, index: int) -> DumpSample:  # type: ignore[override]  # no slices: they would read everything
        """EagleError naming the file, if it is not what its format says."""
        for shards in self._shards:
            if index < len(shards):
                s = shards[index]
                return DumpSample(s.id, s.token_ids, s.aux, s.last, s.loss_mask)
            index -= len(shards)
        file = self.files[index]
        name = file.relative_to(self.directory).as_posix().removesuffix(suffix(file))
        return _vllm(file, name) if self.format == "vllm" else self._pickled(file, name)

    def _pickled(self, file: Path, name: str) -> DumpSample:
        aux_name, last_name = PICKLED[self.format]
        found = _unpickled(file)
        _require(file, found, ("input_ids", aux_name, last_name))
        mask = found.get("loss_mask")
        tokens, aux, last = found["input_ids"].flatten(), _rows(found[aux_name]), _rows(found[last_name])
        if last.shape[-1] != self.hidden_size:
            raise EagleError(f"{file}: {last_name} is {last.shape[-1]} wide, the target {self.hidden_size}")
        return _checked(file, DumpSample(name, tokens, aux, last, None if mask is None else mask.flatten().bool()))


def _vllm(file: Path, name: str) -> DumpSample:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(file)
    except SafetensorError as error:
        raise EagleError(f"{file} is not a whole safetensors file: {error}") from error
    _require(file, found, VLLM)
    states = found["hidden_states"]
    if states.dim() != 3 or states.shape[1] < 2:
        raise EagleError(f"{file}: hidden_states are {list(states.shape)}, should be [tokens, columns, width]")
    if SCALES in found:
        states = (states.float() * found[SCALES]).to(torch.bfloat16)
    return _checked(file, DumpSample(name, found["token_ids"], states[:, :-1].flatten(1), states[:, -1], None))


def _checked(file: Path, sample: DumpSample) -> DumpSample:
    """The sample, if all its parts have as many rows."""
    tokens, width = len(sample.token_ids), sample.last.shape[-1]
    shapes = {"aux": list(sample.aux.shape), "last": list(sample.last.shape)}
    if sample.loss_mask is not None:
        shapes["loss_mask"] = list(sample.loss_mask.shape)
    if any(shape[0] != tokens for shape in shapes.values()) or sample.aux.shape[-1] % width:
        raise EagleError(f"{file} has {tokens} tokens, but {shapes}: states of another text, or of another width")
    return sample


def _unpickled(file: Path) -> Mapping[str, Any]:
    try:
        content = gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else None
        found = torch.load(file if content is None else io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways, and none of them may run what the file says
        raise EagleError(f"{file} cannot be read as tensors alone: {str(error).splitlines()[0]}") from error
    if not isinstance(found, Mapping):
        raise EagleError(f"{file} holds a {type(found).__name__}, not named tensors")
    return found


def _require(file: Path, found: Mapping[str, Any], names: Sequence[str]) -> None:
    missing = [name for name in names if not isinstance(found.get(name), Tensor)]
    if missing:
        raise EagleError(f"{file} has no tensor {', '.join(missing)}; it holds {', '.join(map(str, found))}")


def _rows(states: Tensor) -> Tensor:
    """[T, X] of states that may have a batch axis of 1."""
    return states[0] if states.dim() == 3 and states.shape[0] == 1 else states
