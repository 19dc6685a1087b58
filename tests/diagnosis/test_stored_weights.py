"""What a quantized checkpoint says, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3x.diagnosis.stored_weights import StoredWeights
from eagle3x.targets import Target
from eagle3x.types import EagleError

COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {}}}}
FP8 = {"quant_method": "fp8", "weight_block_size": [2, 2]}
Written = Callable[[dict[str, Tensor], dict[str, Any] | None], Target]


@pytest.fixture
def written(tiny_target: Target, tmp_path: Path) -> Written:
    """The tiny target with other tensors, and a quantization_config."""

    def write(tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> Target:
        path = shutil.copytree(tiny_target.path, tmp_path / "target")
        save_file(tensors, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        return dataclasses.replace(tiny_target, path=path)

    return write


def only(target: Target) -> Tensor:
    """The weight w.weight, which must be all that there is."""
    with StoredWeights(target) as weights:
        (name,) = weights.names
        assert weights.elements() == weights.read(name).numel()
        return weights.read(name)


CODES = torch.tensor([[1, -2, 3, -4], [100, -100, 127, -128]], dtype=torch.int8)


def test_int8_by_row_and_by_tensor(written: Written) -> None:
    scales = torch.tensor([[0.5], [0.25]], dtype=torch.bfloat16)
    target = written({"w.weight": CODES, "w.weight_scale": scales, "w.input_scale": torch.ones(1)}, COMPRESSED)
    assert only(target).tolist() == [[0.5, -1.0, 1.5, -2.0], [25.0, -25.0, 31.75, -32.0]]


def test_int8_with_a_zero_point(written: Written) -> None:
    tensors = {
        "w.weight": CODES,
        "w.weight_scale": torch.tensor([2.0]),
        "w.weight_zero_point": torch.tensor([-1]).char(),
    }
    assert only(written(tensors, COMPRESSED)).tolist() == [[4, -2, 8, -6], [202, -198, 256, -254]]


def test_int4_in_groups(written: Written) -> None:
    """Eight values in an int32, lowest bits first, each 8 too large: 0x76543210 is -8, -7, .. -1."""
    packed = torch.tensor([[0x76543210, 0x76543210], [-1, 0x08080808]], dtype=torch.int32)
    scales = torch.tensor([[1.0, 10.0, 0.5], [1.0, 2.0, 4.0]])
    tensors = {"w.weight_packed": packed, "w.weight_scale": scales, "w.weight_shape": torch.tensor([2, 12])}
    assert only(written(tensors, COMPRESSED)).tolist() == [
        [-8, -7, -6, -5, -40, -30, -20, -10, -4, -3.5, -3, -2.5],
        [7, 7, 7, 7, 14, 14, 14, 14, 0, -32, 0, -32],
    ]


def test_int4_with_packed_zero_points(written: Written) -> None:
    """Zero points are packed along the rows: 0x..98 is 0 for the first row and 1 for the second."""
    packed = torch.tensor([[0x76543210], [0x76543210]], dtype=torch.int32)
    tensors = {
        "w.weight_packed": packed, "w.weight_scale": torch.ones(2, 1), "w.weight_shape": torch.tensor([2, 8]),
        "w.weight_zero_point": torch.tensor([[0x98]], dtype=torch.int32),
    }  # fmt: skip
    assert only(written(tensors, COMPRESSED)).tolist() == [list(range(-8, 0)), list(range(-9, -1))]


def test_fp8_in_blocks_of_which_the_last_are_cut_off(written: Written) -> None:
    weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    target = written({"w.weight": weight, "w.weight_scale_inv": scales}, FP8)
    assert only(target).tolist() == [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]


def test_mxfp4(written: Written) -> None:
    """e2m1: code 1 is 0.5, 2 is 1, 7 is 6, 9 is -0.5; low nibble first. The scale 128 is 2, 126 a half."""
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, :2] = torch.tensor([0x21, 0x97])
    blocks[0, 1, 0, 0] = 0x21
    scales = torch.tensor([[[128], [126]]], dtype=torch.uint8)
    found = only(written({"w.weight_blocks": blocks, "w.weight_scales": scales}, {"quant_method": "mxfp4"}))
    assert found.shape == (1, 32, 2)  # experts, columns, rows: as gpt-oss multiplies
    assert found[0, :4].T.tolist() == [[1, 2, 12, -1], [0.25, 0.5, 0, 0]]


def test_what_is_not_quantized_is_as_it_is(tiny_target: Target, written: Written) -> None:
    with StoredWeights(tiny_target) as weights:
        stored = load_file(tiny_target.path / "model.safetensors")
        assert set(weights.names) == set(stored)
        assert weights.elements() == sum(t.numel() for t in stored.values())
        assert all(torch.equal(weights.read(name), tensor) for name, tensor in stored.items())
    plain = {"layer_scale": torch.tensor([1.5], dtype=torch.bfloat16)}  # a name that only looks like a part
    with StoredWeights(written(plain, None)) as weights:
        assert weights.read("layer_scale").tolist() == [1.5]
        assert weights.read("layer_scale").dtype == torch.float32


@pytest.mark.parametrize(
    ("tensors", "quantization", "says"),
    [
        ({}, {"quant_method": "gptq"}, "quantized by gptq, whose weights are not read here"),
        ({}, COMPRESSED | {"transform_config": {"a": 1}}, "compressed-tensors with transforms"),
        ({"w.weight": CODES}, COMPRESSED, "w.weight cannot be dequantized \\(no scale\\)"),
        (
            {"w.weight_packed": CODES, "w.weight_shape": torch.tensor([2, 8]), "w.weight_scale": torch.ones(2, 1)},
            COMPRESSED,
            "packed as torch.int8",
        ),
        ({"w.weight": CODES, "w.weight_scale": torch.ones(2, 3)}, COMPRESSED, "3 scales for 4 columns"),
        (
            {"w.weight": CODES, "w.weight_scale": torch.ones(2, 2), "w.weight_g_idx": torch.arange(4)},
            COMPRESSED,
            "columns in the order of their activations",
        ),
        ({"w.weight": CODES, "w.weight_scale": CODES[:, :1].clone()}, COMPRESSED, "scales of torch.int8"),
    ],
)
def test_what_is_not_read_is_refused(
    written: Written, tensors: dict[str, Tensor], quantization: dict[str, Any], says: str
) -> None:
    target = written(tensors or {"w.weight": CODES}, quantization)
    with pytest.raises(EagleError, match=says), StoredWeights(target) as weights:
        weights.read("w.weight")
