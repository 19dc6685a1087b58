"""Streamed reference states on disk: reading a large target once for a text is enough.

One safetensors file for a text in `cache_dir()/reference`, named by what decides its content. The files only save time:
deleting them is safe, and one that cannot be read is made again.

Shapes: T tokens, H hidden, A boundaries, C candidates.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3x.diagnosis.reference import Candidate, Reference
from eagle3x.fingerprint import cache_dir
from eagle3x.identity import digest

if TYPE_CHECKING:
    from eagle3x.targets import Target

VERSION = 1
"""Raised when the same target and text would give other states."""
CANDIDATES = "candidates"


@dataclass(frozen=True)
class ReferenceCache:
    """The states of one target, computed on one type of device ("cpu", "cuda")."""

    target: Target
    device: str

    def load_states(self, text: Sequence[int], boundaries: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """aux [T, A*H] and last [T, H], if they were kept."""
        found = _load(self._file(text, list(boundaries)))
        return None if found is None else (found[0]["aux"], found[0]["last"])

    def keep_states(self, text: Sequence[int], boundaries: Sequence[int], aux: Tensor, last: Tensor) -> None:
        """For `load_states`."""
        _keep(self._file(text, list(boundaries)), {"aux": aux, "last": last}, {})

    def load_reference(self, text: Sequence[int]) -> Reference | None:
        """All candidates, if they were kept."""
        found = _load(self._file(text, CANDIDATES))
        if found is None:
            return None
        tensors, metadata = found
        candidates = tuple(Candidate(boundary, kind) for boundary, kind in json.loads(metadata[CANDIDATES]))
        return Reference(self.target.num_blocks, candidates, tensors["states"])

    def keep_reference(self, text: Sequence[int], reference: Reference) -> None:
        """For `load_reference`."""
        candidates = json.dumps([[c.boundary, c.kind] for c in reference.candidates])
        _keep(self._file(text, CANDIDATES), {"states": reference.states}, {CANDIDATES: candidates})

    def _file(self, text: Sequence[int], what: Any) -> Path:
        made_by = {"version": VERSION, "transformers": version("transformers"), "torch": version("torch")}
        key = {"target": self._content, "device": self.device, "tokens": list(text), "what": what, **made_by}
        return cache_dir() / "reference" / f"{digest(key)}.safetensors"

    @cached_property
    def _content(self) -> dict[str, Any]:
        """What of the target decides its states: neither its tokenizer nor its template."""
        identity = self.target.identity()
        return {part: identity[part] for part in ("weights", "config")}


def _load(file: Path) -> tuple[dict[str, Tensor], Mapping[str, str]] | None:
    with suppress(FileNotFoundError, SafetensorError), safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}, tensors.metadata() or {}  # noqa: SIM118
    return None


def _keep(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".writing-") as folder:
        written = Path(folder) / file.name
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, written, metadata)
        written.replace(file)
