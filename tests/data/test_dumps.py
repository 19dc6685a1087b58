"""Dumps of other tools, written as those tools write them, are read to the bit; what they are not is named."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3x.data.dumps import Dump
from eagle3x.data.shard_index import ShardSpec
from eagle3x.data.shards import ShardWriter
from eagle3x.types import EagleError, HiddenStates, Response

H, T = 8, 6
TOKENS = torch.arange(10, 10 + T)
AUX, LAST = torch.arange(T * 2 * H).reshape(T, 2 * H).float(), -torch.arange(T * H).reshape(T, H).float()
MASK = torch.tensor([0, 0, 1, 1, 1, 0])


def vllm(directory: Path) -> None:
    """vLLM's connector, and speculators' hs_<i>.safetensors: columns beside each other, the last one last."""
    directory.mkdir(parents=True)
    states = torch.stack([*AUX.split(H, dim=1), LAST], dim=1)
    save_file({"hidden_states": states.bfloat16(), "token_ids": TOKENS}, directory / "hs_0.safetensors")


def vllm_fp8(directory: Path) -> None:
    """speculators' FP8 connector: one scale a token (hs_connectors/fp8_utils.py)."""
    directory.mkdir(parents=True)
    states = torch.stack([*AUX.split(H, dim=1), LAST], dim=1)
    scales = states.abs().amax(dim=(1, 2), keepdim=True) / 448
    tensors = {"hidden_states": (states / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}
    save_file({**tensors, "token_ids": TOKENS}, directory / "hs_0.safetensors")


def specforge(directory: Path) -> None:
    (directory / "rows_0-2000").mkdir(parents=True)
    record = {"input_ids": TOKENS, "loss_mask": MASK, "aux_hidden_state": AUX[None], "hidden_state": LAST[None]}
    torch.save(record, directory / "rows_0-2000" / "data_0.ckpt")


def specforge_gz(directory: Path) -> None:
    specforge(directory)
    plain = directory / "rows_0-2000" / "data_0.ckpt"
    plain.with_name("data_0.ckpt.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def modelopt(directory: Path) -> None:
    directory.mkdir(parents=True)
    record = {"input_ids": TOKENS, "loss_mask": MASK, "aux_hidden_states": AUX, "hidden_states": LAST}
    torch.save({**record, "conversation_id": "abc"}, directory / "abc.pt")


def shards(directory: Path) -> None:
    with ShardWriter(directory / "train", ShardSpec((1, 3), H, "float32", "post_norm"), 100) as writer:
        tokens = tuple(TOKENS.tolist())
        mask = tuple(MASK.bool().tolist())
        writer.add(
            HiddenStates("a", tokens, AUX, LAST, "post_norm"), Response("a", "x", "train", tokens, mask, 2, 3, "given")
        )


WRITERS = {
    "vllm": (vllm, "vllm", "hs_0", False, 0),
    "fp8": (vllm_fp8, "vllm", "hs_0", False, 0.07),  # e4m3 has 3 bits of fraction: half a step is 1/16
    "specforge": (specforge, "specforge", "rows_0-2000/data_0", True, 0),
    "specforge, compressed": (specforge_gz, "specforge", "rows_0-2000/data_0", True, 0),
    "modelopt": (modelopt, "modelopt", "abc", True, 0),
    "shards": (shards, "eagle3x", "a", True, 0),
}


@pytest.mark.parametrize("tool", WRITERS)
def test_every_tools_dump_is_read(tool: str, tmp_path: Path) -> None:
    write, form, name, masked, error = WRITERS[tool]
    write(tmp_path / "dump")
    dump = Dump(tmp_path / "dump", H)
    assert (dump.format, len(dump)) == (form, 1)
    sample = dump[0]
    assert sample.id == name
    assert torch.equal(sample.token_ids, TOKENS)
    for found, wanted in ((sample.aux, AUX), (sample.last, LAST)):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found.float(), wanted, rtol=error, atol=error * 95)
    assert (sample.loss_mask is not None) == masked
    if sample.loss_mask is not None:
        assert torch.equal(sample.loss_mask, MASK.bool())


def ckpt(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        specforge(directory)
        file = directory / "rows_0-2000" / "data_0.ckpt"
        record = torch.load(file)
        change(record)
        torch.save(record, file)

    return write


def pickled_code(directory: Path) -> None:
    directory.mkdir()
    torch.save({"input_ids": Path("x")}, directory / "a.ckpt")


def cut_file(directory: Path) -> None:
    vllm(directory)
    file = directory / "hs_0.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def a_list(directory: Path) -> None:
    directory.mkdir()
    buffer = io.BytesIO()
    torch.save([TOKENS], buffer)
    (directory / "a.pt").write_bytes(buffer.getvalue())


FAULTS = {
    "no last state": (ckpt(lambda r: r.pop("hidden_state")), "no tensor hidden_state"),
    "another width": (ckpt(lambda r: r.update(hidden_state=LAST[None, :, :4])), "4 wide, the target 8"),
    "states of another text": (ckpt(lambda r: r.update(input_ids=TOKENS[1:])), "has 5 tokens, but"),
    "mask of another text": (ckpt(lambda r: r.update(loss_mask=MASK[1:])), "has 6 tokens, but"),
    "a pickle with more than tensors": (pickled_code, "cannot be read as tensors alone"),
    "not named": (a_list, "holds a list"),
    "cut": (cut_file, "not a whole safetensors file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_such_dump_is_named(fault: str, tmp_path: Path) -> None:
    write, message = FAULTS[fault]
    write(tmp_path / "dump")
    with pytest.raises(EagleError, match=message):
        Dump(tmp_path / "dump", H)[0]


def test_one_folder_holds_one_dump(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"no \.safetensors"):
        Dump(tmp_path, H)
    vllm(tmp_path / "a")
    modelopt(tmp_path / "b")
    with pytest.raises(EagleError, match="files of modelopt and vllm"):
        Dump(tmp_path, H)
