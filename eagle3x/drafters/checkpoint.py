"""Drafters on disk, as `LlamaForCausalLMEagle3`: config.json and model.safetensors. Pickles are never read.

The embedding is left out where it is the target's: both engines then share theirs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.targets import Target
from eagle3x.types import EagleError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
EMBEDDING = "embed_tokens.weight"


def save(drafter: Eagle3, directory: Path, extra_config: Mapping[str, Any]) -> None:
    """Write the drafter, without its embedding, which must be the target's. `extra_config` joins config.json."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in drafter.state_dict().items() if name != EMBEDDING}
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    _write(directory, tensors, {**drafter.arch.to_config(), "torch_dtype": dtype, **extra_config})


def republish(source: Path, directory: Path, target: Target) -> Eagle3:
    """Check the checkpoint in `source` by loading it, and write it as one file: same tensors, names of this format."""
    drafter = load(source, target)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_read(source), directory / WEIGHTS, metadata={"format": "pt"})
    shutil.copyfile(source / CONFIG, directory / CONFIG)
    return drafter


def load(directory: Path, target: Target) -> Eagle3:
    """The drafter in float32, every weight of which came from the checkpoint (or, the embedding, from the target).

    Raises:
        EagleError: a missing, unknown or misshaped tensor; a vocabulary map that is missing, out of range or stale; a
            weight that is not finite; a drafter that was made for a target of other sizes.
    """
    arch = _architecture(directory, target)
    tensors = _read(directory)
    with torch.device("meta"):
        drafter = Eagle3(arch)
    wanted = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    if EMBEDDING not in tensors:
        if arch.hidden_size != target.hidden_size:
            raise EagleError(
                f"{directory} has no {EMBEDDING}, and the target's is {target.hidden_size} wide, not {arch.hidden_size}"
            )
        tensors[EMBEDDING] = target.embedding()
    _check_vocabulary(directory, arch, tensors)
    _check_names(directory, wanted, tensors)
    state = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise EagleError(f"{directory}: {name} has values that are not finite")
    drafter.load_state_dict(state, strict=True, assign=True)
    unset = [name for name, t in (*drafter.named_parameters(), *drafter.named_buffers()) if t.is_meta]
    if unset:
        raise EagleError(f"{directory}: {', '.join(unset)} would be freshly initialised")
    return drafter


def _architecture(directory: Path, target: Target) -> Architecture:
    file = directory / CONFIG
    if not file.is_file():
        raise EagleError(f"{directory} has no {CONFIG}: it must be the directory of a drafter")
    try:
        arch = Architecture.from_config(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise EagleError(f"{file} is not valid JSON: {error}") from error
    for key, own, its in (
        ("vocab_size", arch.vocab_size, target.vocab_size),
        ("target_hidden_size", arch.target_hidden_size, target.hidden_size),
    ):
        if own != its:
            raise EagleError(f"{file}: {key} is {own}, but {target.name} has {its}: it is a drafter of another target")
    return arch


def _read(directory: Path) -> dict[str, Tensor]:
    """All tensors, under the names of this format (`layers.0.` is the other name of `midlayer.`)."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        hint = ": its .bin files are pickles, save them as safetensors" if any(directory.glob("*.bin")) else ""
        raise EagleError(f"{directory} has no safetensors{hint}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                known = f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
                if known in tensors:
                    raise EagleError(f"{file}: {name} is there twice")
                tensors[known] = stored.get_tensor(name)
    return tensors


def _check_vocabulary(directory: Path, arch: Architecture, tensors: dict[str, Tensor]) -> None:
    """d2t and t2d agree with the config and each other; fills in what may be left out."""
    size, vocab = arch.draft_vocab_size, arch.vocab_size
    if "d2t" not in tensors:
        if size != vocab:
            raise EagleError(
                f"{directory} has no d2t, though its draft vocabulary ({size}) is smaller than the target's ({vocab}):"
                " drafts would be other tokens than the drafter means"
            )
        tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
    d2t = tensors["d2t"]
    if tuple(d2t.shape) != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise EagleError(f"{directory}: d2t is {list(d2t.shape)} {d2t.dtype}, should be {size} integer offsets")
    ids = torch.arange(size) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != size:
        raise EagleError(
            f"{directory}: i + d2t[i] must be {size} different ids below {vocab}: offsets, not target ids themselves"
        )
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), mask):
        raise EagleError(f"{directory}: stale vocabulary: t2d and d2t name different tokens")
    tensors["d2t"], tensors["t2d"] = d2t.long(), mask


def _check_names(directory: Path, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise EagleError(f"{directory} lacks {', '.join(missing)}: they would be freshly initialised")
    unknown = sorted(tensors.keys() - wanted.keys())
    if unknown:
        raise EagleError(f"{directory} has weights that its config has no place for: {', '.join(unknown)}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise EagleError(f"{directory}: {name} is {list(tensors[name].shape)}, its config says {list(shape)}")


def _write(directory: Path, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
