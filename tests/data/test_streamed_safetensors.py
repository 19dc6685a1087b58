"""Files written from pieces are what the format's own writer makes of whole tensors, byte for byte where it matters."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3x.data.streamed_safetensors import write_pieces


def pieces() -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 1, 250)
    whole = [torch.randn(n, 4, 6, generator=generator) for n in lengths]
    return {
        "token_ids": [torch.arange(n) for n in lengths],
        "aux": [states[:, :3].flatten(1).to(torch.bfloat16) for states in whole],
        "last": [states[:, 3] for states in whole],  # not contiguous
        "half": [states[:, 0].half() for states in whole],
        "loss_mask": [torch.arange(n) % 2 == 0 for n in lengths],
    }


def test_the_file_is_read_back_by_the_formats_own_reader(tmp_path: Path) -> None:
    checksum = write_pieces(tmp_path / "x.safetensors", pieces())
    found = load_file(tmp_path / "x.safetensors")
    expected = {name: torch.cat(parts) for name, parts in pieces().items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert checksum == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()


def test_one_tensor_gives_the_same_bytes_as_the_formats_own_writer(tmp_path: Path) -> None:
    aux = pieces()["aux"]
    write_pieces(tmp_path / "ours", {"aux": aux})
    save_file({"aux": torch.cat(aux)}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_slice_can_be_mapped(tmp_path: Path) -> None:
    write_pieces(tmp_path / "x", pieces())
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert torch.equal(file.get_slice("last")[3:4], pieces()["last"][1])


@pytest.mark.parametrize(
    "wrong",
    [[torch.zeros(2, 3), torch.zeros(2, 4)], [torch.zeros(2), torch.zeros(2).half()], []],
    ids=["rows of other shapes", "other dtypes", "no piece"],
)
def test_pieces_that_are_not_one_tensor_are_refused_before_a_byte_is_written(
    tmp_path: Path, wrong: list[torch.Tensor]
) -> None:
    with pytest.raises(ValueError, match="aux: pieces of one tensor"):
        write_pieces(tmp_path / "x", {"aux": wrong})
    assert not (tmp_path / "x").exists()
