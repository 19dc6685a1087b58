"""Codes and scales of known rows, worked out by hand, and the checkpoint that is made of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3x.quantization import rounding
from eagle3x.targets import Target

UP = "model.layers.0.mlp.up_proj"


def layer(weight: Tensor, scheme: str, folder: Path, target: Target) -> dict[str, Tensor]:
    """What becomes of the weight of one layer of a target."""
    shutil.copytree(target.path, folder / "target")
    file = folder / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}.weight"] = weight
    save_file(tensors, file, metadata={"format": "pt"})
    rounding.write(folder / "target", scheme, folder / scheme)
    written = load_file(folder / scheme / "model.safetensors")
    return {name.removeprefix(f"{UP}."): tensor for name, tensor in written.items() if name.startswith(UP)}


def row(values: list[float], others: float) -> Tensor:
    """[64, 32]: a row that begins with `values`, among rows of one value."""
    weight = torch.full((64, 32), others)
    weight[5] = torch.tensor([*values, *[0.0] * (32 - len(values))])
    return weight


def test_int8_codes(tiny_target: Target, tmp_path: Path) -> None:
    """255 codes lie between -127.5 and 127.5 scales, so a row whose largest value is 63.75 has a scale of one half."""
    made = layer(row([63.75, -63.75, 0.24, -0.26, 5.2, -1.8], 1.0), "int8", tmp_path, tiny_target)
    assert made["weight"].dtype == torch.int8
    assert made["weight_scale"].shape == (64, 1)
    assert float(made["weight_scale"][5]) == 0.5
    assert made["weight"][5, :7].tolist() == [127, -128, 0, -1, 10, -4, 0]
    assert float(made["weight_scale"][0]) == pytest.approx(1 / 127.5)


def test_narrow_int8_codes() -> None:
    """No code is above 64: 63.75 has it, at a scale of 0.99609375, and 5.2 is 5.22 of that. Zeros stay zeros."""
    weight = row([63.75, -63.75, 5.2, -1.8], 0.0)
    made = rounding.rounded(weight, preset_name_to_scheme("W8A8", ["Linear"]), "int-quantized", narrow=True)
    assert float(made["weight_scale"][5]) == 0.99609375
    assert made["weight"][5, :5].tolist() == [64, -64, 5, -2, 0]
    assert not made["weight"][0].any()


def test_int4_codes_and_how_they_are_packed(tiny_target: Target, tmp_path: Path) -> None:
    """15 codes between -7.5 and 7.5 scales: a largest value of 1.875 has a scale of a quarter. Eight codes, each with 8
    added, fill a 32-bit word from its lowest four bits on."""
    made = layer(row([1.875, -1.875, 0.25, 0.375, 0.1, -0.3, -1.0, 1.7], 1.0), "int4", tmp_path, tiny_target)
    assert made["weight_scale"].shape == (64, 1)
    assert float(made["weight_scale"][5]) == 0.25
    codes = [7, -8, 1, 2, 0, -1, -4, 7]  # 7.5, -7.5, 1, 1.5, 0.4, -1.2, -4, 6.8; halves go to the even code
    word = sum((code + 8) << (4 * place) for place, code in enumerate(codes))
    assert int(made["weight_packed"][5, 0]) % 2**32 == word
    assert made["weight_packed"][5, 1:].tolist() == [0x88888888 - 2**32] * 3
    assert made["weight_shape"].tolist() == [64, 32]


def test_fp8_codes(tiny_target: Target, tmp_path: Path) -> None:
    """448 is the largest e4m3 value; between 16 and 32 they are 2 apart, and 17 is a tie."""
    made = layer(row([448.0, 17.0, 19.1, -0.3], 1.0), "fp8", tmp_path, tiny_target)
    assert float(made["weight_scale"][5]) == 1.0
    assert made["weight"][5, :4].float().tolist() == [448.0, 16.0, 20.0, -0.3125]


def test_the_scale_is_one_that_the_dtype_has(tiny_target: Target, tmp_path: Path) -> None:
    """1 / 127.5 is 0.0078431, its nearest bfloat16 0.0078735: 255/512 is 63.5 of the first, 63.26 of the second."""
    weight = row([1.0, 255 / 512], 1.0).to(torch.bfloat16)
    made = layer(weight, "int8", tmp_path, tiny_target)
    assert made["weight_scale"].dtype == torch.bfloat16
    assert float(made["weight_scale"][5]) == 0.00787353515625
    assert made["weight"][5, :2].tolist() == [127, 63]


def test_all_else_is_the_targets(tiny_target: Target, tmp_path: Path) -> None:
    rounding.write(tiny_target.path, "int4", tmp_path / "int4")
    before, after = (
        load_file(tiny_target.path / "model.safetensors"),
        load_file(tmp_path / "int4" / "model.safetensors"),
    )
    kept = [name for name in before if "_proj" not in name]
    assert len(kept) == 3 + 2 * 6  # embedding, final norm, head; two norms in each block
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert not [name for name in after if name.endswith("_proj.weight")]
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    described = config.pop("quantization_config")
    assert config == json.loads((tiny_target.path / "config.json").read_text())
    assert (described["format"], described["ignore"]) == ("pack-quantized", ["lm_head"])
    assert described["config_groups"]["group_0"]["weights"]["group_size"] == 32
    others = {file.name for file in tiny_target.path.iterdir()} - {"config.json", "model.safetensors"}
    assert others
    for name in others:
        assert (tmp_path / "int4" / name).read_bytes() == (tiny_target.path / name).read_bytes()


def test_a_checkpoint_of_several_files_stays_one(tiny_target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    shutil.copytree(tiny_target.path, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    where = {name: file for file, part in parts.items() for name in part}
    (folder / rounding.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    rounding.write(folder, "int8", tmp_path / "int8")
    rounding.write(tiny_target.path, "int8", tmp_path / "whole")
    index = json.loads((tmp_path / "int8" / rounding.INDEX).read_text())["weight_map"]
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(index) == set(whole)
    for name, tensor in whole.items():
        with safe_open(tmp_path / "int8" / index[name], framework="pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)


@pytest.mark.parametrize(
    ("inputs", "size"), [((4096, 14336), 128), ((576, 1536), 64), ((32, 64), 32), ((48, 64), None)]
)
def test_groups_are_as_large_as_all_layers_allow(inputs: tuple[int, int], size: int | None) -> None:
    shapes = {f"model.layers.0.mlp.{name}_proj.weight": [8, i] for name, i in zip(("up", "down"), inputs, strict=True)}
    assert rounding.group_size({**shapes, "model.embed_tokens.weight": [8, 7]}) == size


def test_what_is_not_rounded(tiny_target: Target, tmp_path: Path) -> None:
    assert rounding.refusals(tiny_target.path, "int8") == []
    assert "nvfp4 checkpoint, which takes data" in rounding.refusals(tiny_target.path, "nvfp4")[0]
    shutil.copytree(tiny_target.path, tmp_path / "experts")
    file = tmp_path / "experts" / "model.safetensors"
    router = {"model.layers.3.mlp.gate.weight": torch.zeros(4, 32)}
    save_file({**load_file(file), **router}, file, metadata={"format": "pt"})
    (reason,) = rounding.refusals(tmp_path / "experts", "int8")
    assert "dense blocks" in reason
    assert "model.layers.3.mlp.gate.weight" in reason
