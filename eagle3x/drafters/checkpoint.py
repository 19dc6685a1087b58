"""Drafters on disk: read in every format that their trainers write, written as `LlamaForCausalLMEagle3`.

config.json and model.safetensors. The embedding is left out where it is the target's: both engines then share theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3x.capture import KEY, NESTED
from eagle3x.drafters import weight_names
from eagle3x.drafters.architecture import Architecture, MadeBy
from eagle3x.drafters.config_keys import SPECULATORS, is_speculators
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.drafters.location import CONFIG
from eagle3x.targets import Target
from eagle3x.types import EagleError

WEIGHTS = "model.safetensors"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
UNRELATED = 0.5
"""An embedding whose median cosine to the target's is below this was left random, or is another model's."""


@dataclass(frozen=True)
class Published:
    """A checkpoint as it was published, in `where`: its config.json, its weights under our names in their dtypes."""

    where: str
    config: Mapping[str, Any]
    arch: Architecture
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> str:
        """Of fc's weight."""
        return str(self.tensors["fc.weight"].dtype).removeprefix("torch.")


def save(drafter: Eagle3, directory: Path, extra_config: Mapping[str, Any], with_embedding: bool = False) -> None:
    """Write the drafter; without its embedding, which then must be the target's. `extra_config` joins config.json."""
    left_out = () if with_embedding else (EMBEDDING,)
    tensors = {n: t.detach().cpu().contiguous() for n, t in drafter.state_dict().items() if n not in left_out}
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    write(directory, tensors, {**drafter.arch.to_config(), "torch_dtype": dtype, **extra_config})


def republish(published: Published, directory: Path, target: Target) -> Eagle3:
    """Check a checkpoint by loading it, and write it in our format: same tensors, and the layer ids as they were."""
    drafter = module(published, target)
    ids = {key: published.config[key] for key in (KEY, NESTED) if key in published.config}
    tensors = dict(published.tensors)
    tensors.setdefault(HEAD, drafter.lm_head.weight.detach())
    write(directory, tensors, {**published.arch.to_config(), "torch_dtype": published.dtype, **ids})
    return drafter


def load(directory: Path, target: Target, made_by: MadeBy | None = None, allow_bin: bool = False) -> Eagle3:
    """The drafter in `directory`: `module(read(...))`."""
    return module(read(directory, made_by, allow_bin), target)


def read(directory: Path, made_by: MadeBy | None = None, allow_bin: bool = False) -> Published:
    """Config and weights. EagleError for a format, a config key or a file that is not understood."""
    file = directory / CONFIG
    if not file.is_file():
        raise EagleError(f"{directory} has no {CONFIG}: it must be the directory of a drafter")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EagleError(f"{file} is not valid JSON: {error}") from error
    arch = Architecture.from_config(config, made_by)
    return Published(str(directory), config, arch, weight_names.read(directory, allow_bin))


def module(published: Published, target: Target) -> Eagle3:
    """The drafter in float32, every weight of which came from the checkpoint (or, the embedding, from the target).

    Raises:
        EagleError: a missing, unknown or misshaped tensor; a vocabulary map that is missing, out of range or stale; a
            weight that is not finite; a drafter that was made for a target of other sizes.
    """
    name, arch, tensors = published.where, published.arch, dict(published.tensors)
    for key, own, its in (
        ("vocab_size", arch.vocab_size, target.vocab_size),
        ("target_hidden_size", arch.target_hidden_size, target.hidden_size),
    ):
        if own != its:
            raise EagleError(f"{name}: {key} is {own}, but {target.name} has {its}: it is a drafter of another target")
    with torch.device("meta"):
        drafter = Eagle3(arch)
    wanted = {key: tuple(t.shape) for key, t in drafter.state_dict().items()}
    if EMBEDDING not in tensors:
        if arch.hidden_size != target.hidden_size:
            raise EagleError(
                f"{name} has no {EMBEDDING}, and the target's is {target.hidden_size} wide, not {arch.hidden_size}"
            )
        tensors[EMBEDDING] = target.embedding()
    if HEAD not in tensors and published.config.get("draft_vocab_size") is None:
        tensors[HEAD] = target.head()  # as SGLang does
    _check_vocabulary(name, arch, tensors)
    _check_names(name, wanted, tensors)
    state = {key: t.float() if t.is_floating_point() else t for key, t in tensors.items()}
    for key, tensor in state.items():
        if tensor.is_floating_point() and not _finite(tensor):
            raise EagleError(f"{name}: {key} has values that are not finite")
    drafter.load_state_dict(state, strict=True, assign=True)
    unset = [key for key, t in (*drafter.named_parameters(), *drafter.named_buffers()) if t.is_meta]
    if unset:
        raise EagleError(f"{name}: {', '.join(unset)} would be freshly initialised")
    return drafter


def format_of(config: Mapping[str, Any]) -> str:
    """What the checkpoint's format is called."""
    return f"speculators ({SPECULATORS[0]})" if is_speculators(config) else config["architectures"][0]


def embedding_likeness(drafter: Eagle3, target: Target) -> float | None:
    """Median cosine between a row of the drafter's embedding and of the target's; None if their widths differ."""
    own = drafter.embed_tokens.weight.detach()
    if own.shape[1] != target.hidden_size:
        return None
    return float(torch.nn.functional.cosine_similarity(own.float(), target.embedding(), dim=1).median())


def _check_vocabulary(name: str, arch: Architecture, tensors: dict[str, Tensor]) -> None:
    """d2t and t2d agree with the config and each other; fills in what may be left out."""
    size, vocab = arch.draft_vocab_size, arch.vocab_size
    if "d2t" not in tensors:
        if size != vocab:
            raise EagleError(
                f"{name} has no d2t, though its draft vocabulary ({size}) is smaller than the target's ({vocab}):"
                " drafts would be other tokens than the drafter means"
            )
        tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
    d2t = tensors["d2t"]
    if tuple(d2t.shape) != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise EagleError(f"{name}: d2t is {list(d2t.shape)} {d2t.dtype}, should be {size} integer offsets")
    ids = torch.arange(size) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != size:
        raise EagleError(
            f"{name}: i + d2t[i] must be {size} different ids below {vocab}: offsets, not target ids themselves"
        )
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), mask):
        raise EagleError(f"{name}: stale vocabulary: t2d and d2t name different tokens")
    tensors["d2t"], tensors["t2d"] = d2t.long(), mask


def _finite(tensor: Tensor) -> bool:
    """Whether every value is: NaN and infinity reach the extremes, which are found in a twentieth of the time."""
    return tensor.numel() == 0 or bool(torch.stack(tensor.aminmax()).isfinite().all())


def _check_names(name: str, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise EagleError(f"{name} lacks {', '.join(missing)}: they would be freshly initialised")
    unknown = sorted(tensors.keys() - wanted.keys())
    if unknown:
        raise EagleError(f"{name} has weights that its config has no place for: {', '.join(unknown)}")
    for key, shape in wanted.items():
        if tuple(tensors[key].shape) != shape:
            raise EagleError(f"{name}: {key} is {list(tensors[key].shape)}, its config says {list(shape)}")


def write(directory: Path, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """config.json and model.safetensors, as they are given. Each tensor is stored for itself, whatever it shares."""
    directory.mkdir(parents=True, exist_ok=True)
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    alone = {n: t if memory.count(at) == 1 else t.clone() for (n, t), at in zip(tensors.items(), memory, strict=True)}
    save_file({n: t.contiguous() for n, t in alone.items()}, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
