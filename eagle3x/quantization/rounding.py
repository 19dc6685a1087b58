"""A quantized checkpoint made of an unquantized one by rounding each weight to its nearest code. No data is needed.

Schemes, scales, codes and packing are those of the library compressed-tensors; what is ours is to go through a
checkpoint file by file, so that a target of any size takes the memory of one file.

    int8   W8A8: a scale for each output channel; engines round what a layer reads, token by token, while they run.
           `narrow`: codes of at most 64 instead of 128, for CPUs that add up products in 16 bits (cpu.py)
    int4   W4A16: a scale for each group of input channels, as large as all layers allow, 128 at most
    fp8    W8A8 in e4m3, scales as for int8

Embedding, norms and head stay as they are. Shapes: O output and I input channels of a layer, g of a group.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.progress import track
from eagle3x.targets import weight_files

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme
    from torch import Tensor

VERSION = 1
"""Part of every key that a rounded target has: raise it when the same weights would get other codes."""
PRESETS = {
    "int8": ("W8A8", "int-quantized"),
    "int4": ("W4A16", "pack-quantized"),
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
}
"""What we make, as the library calls it: scheme and format."""
GROUPS = (128, 64, 32)
"""Input channels that share a scale, of those that engines have kernels for."""
LAYER = re.compile(r"(.*\blayers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.weight")
"""Linear layers of a dense decoder, as checkpoints name them."""
LEFT = ("embed_tokens.weight", "lm_head.weight")
"""Matrices that stay as they are."""
NARROW = 64
"""The largest code that fits (cpu.py)."""
INDEX = "model.safetensors.index.json"


def refusals(path: Path, scheme: str) -> list[str]:
    """Why the checkpoint in `path` cannot be rounded; empty if it can. Reads the files' headers; no torch.

    Layers under other names (experts, state spaces) may need another treatment, which nobody has looked at.
    """
    if scheme not in PRESETS:
        return [f"eagle3x makes no {scheme} checkpoint, which takes data to calibrate; give one as the target"]
    shapes = {name: shape for file in weight_files(path) for name, shape in _matrices(file).items()}
    if other := sorted(name for name in shapes if not LAYER.fullmatch(name) and not name.endswith(LEFT)):
        return [f"only targets of dense blocks are rounded, not {other[0]}; give a {scheme} checkpoint as the target"]
    if scheme == "int4" and group_size(shapes) is None:
        return [f"no group of {', '.join(map(str, GROUPS))} channels divides the inputs of all layers"]
    return []


def write(source: Path, scheme: str, directory: Path, narrow: bool = False) -> None:
    """Write the checkpoint of `source`, rounded to `scheme`, into the new folder `directory`."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = weight_files(source)
    matrices = {name: shape for file in files for name, shape in _matrices(file).items()}
    preset, kind = PRESETS[scheme]
    described = _scheme(preset, group_size(matrices))
    directory.mkdir()
    for file in source.iterdir():
        if file.suffix not in (".safetensors", ".bin", ".gguf") and file.name != INDEX and file.is_file():
            shutil.copyfile(file, directory / file.name)
    where: dict[str, str] = {}
    done = track(iter(range(len(matrices))), f"Rounding to {scheme}", len(matrices))
    for file in files:
        written: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no dict)
                tensor, layer = tensors.get_tensor(name), LAYER.fullmatch(name)
                if layer is None:
                    written[name] = tensor
                else:
                    parts = rounded(tensor, described, kind, narrow)
                    written |= {f"{layer[1]}.{part}": value.contiguous() for part, value in parts.items()}
                if name in matrices:
                    next(done)
        save_file(written, directory / file.name, metadata={"format": "pt"})
        (directory / file.name).chmod(0o644)
        where |= dict.fromkeys(written, file.name)
    next(done, None)
    if len(files) > 1:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=1), encoding="utf-8")
    config = QuantizationConfig(
        config_groups={"group_0": described},
        format=kind,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    ModelCompressor(quantization_config=config).update_config(str(directory))


def rounded(weight: Tensor, scheme: QuantizationScheme, kind: str, narrow: bool = False) -> dict[str, Tensor]:
    """The tensors that take the place of a layer's weight [O, I]. narrow: of INT8 alone.

    The scale is rounded to the weight's own dtype before codes are chosen for it: no engine then changes it.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = scheme.weights
    assert weights is not None, "every preset quantizes weights"
    exact = weight.float()
    grouped = exact.unflatten(-1, (-1, weights.group_size)) if weights.group_size else exact[:, None]
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), weights)
    if narrow:
        scale *= 127.5 / NARROW
    compressor: Any = BaseCompressor.get_value_from_registry(kind)
    return compressor.compress({"weight": exact, "weight_scale": scale.to(weight.dtype)}, scheme)


def _scheme(preset: str, group_size: int | None) -> QuantizationScheme:
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights is not None and scheme.weights.group_size:
        scheme.weights.group_size = group_size
    return scheme


def group_size(shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The largest group that divides the inputs of every layer; None if there is none. shapes: [O, I] by name."""
    inputs = [shape[1] for name, shape in shapes.items() if LAYER.fullmatch(name)]
    return next((group for group in GROUPS if all(size % group == 0 for size in inputs)), None)


def _matrices(file: Path) -> dict[str, list[int]]:
    """Name and shape of every weight of more than one dimension, from the file's header."""
    from safetensors import safe_open

    with safe_open(file, framework="np") as tensors:
        shapes: dict[str, Any] = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return {name: shape for name, shape in shapes.items() if len(shape) > 1}
