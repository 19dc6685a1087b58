"""What published drafters call their weights, in our names: those of `LlamaForCausalLMEagle3` without a prefix.

| ours | also called |
| --- | --- |
| `midlayer.*` | `layers.0.*` (speculators, ModelOpt, Automodel, vLLM) |
| `fc.weight` and so on | `model.fc.weight` and so on (Automodel) |
| `fc_norm.0`, `.1`, `.2` | `aux_norm_low`, `aux_norm_mid`, `aux_norm_high` (older SGLang) |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3x.drafters.location import weight_files
from eagle3x.types import EagleError

AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
LEFT_OUT = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""The target's head and norm, which older speculators save, and frequencies that the config gives as well."""


def ours(name: str) -> str | None:
    """The name of a weight here; None if it is not part of the drafter."""
    known = name.removeprefix("model.")
    if known.endswith(LEFT_OUT):
        return None
    if known.startswith("layers.0."):
        return f"midlayer.{known.removeprefix('layers.0.')}"
    first, dot, rest = known.partition(".")
    return f"{AUX_NORMS.get(first, first)}{dot}{rest}"


def speculators(name: str) -> str:
    """What speculators calls a weight of ours."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def read(directory: Path, allow_bin: bool) -> dict[str, Tensor]:
    """All tensors of a checkpoint under our names, in their own dtypes.

    Raises EagleError for no weights, a weight that is there twice, or a pickle that holds more than tensors.
    """
    files = weight_files(directory, allow_bin)
    if not files:
        hint = ": its .bin files are pickles (drafter.allow_bin=true)" if any(directory.glob("*.bin")) else ""
        raise EagleError(f"{directory} has no safetensors{hint}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _tensors(file):
            known = ours(name)
            if known is None:
                continue
            if known in tensors:
                raise EagleError(f"{file}: {name} is there twice")
            tensors[known] = tensor
    return tensors


def _tensors(file: Path) -> Iterable[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stored:
            return [(name, stored.get_tensor(name)) for name in stored.keys()]  # noqa: SIM118 (not a dict)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways, and none of them may run what the file says
        raise EagleError(f"{file} cannot be read as tensors alone: {str(error).splitlines()[0]}") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise EagleError(f"{file} holds other things than named tensors: it is no drafter's weights")
    return found.items()
