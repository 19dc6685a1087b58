"""What is seen of a dump before any work starts: each thing that would only come up hours later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3x.composition import cells
from eagle3x.data import dump_files
from eagle3x.data.shard_index import ShardSpec
from eagle3x.data.shards import ShardWriter
from eagle3x.preflight import check
from eagle3x.targets import Target
from eagle3x.types import ConfigError, HiddenStates, LastNorm, Response

BOUNDARIES, H, T = (1, 3, 4), 32, 5


def vllm(columns: int = 4, width: int = H, **names: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        states = {"token_ids": torch.arange(T), "hidden_states": torch.zeros(T, columns, width)}
        save_file({names.get(name, name): tensor for name, tensor in states.items()}, directory / "hs_0.safetensors")

    return write


def shards(boundaries: tuple[int, ...] = BOUNDARIES, width: int = H) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        norm: LastNorm = "post_norm"
        with ShardWriter(directory / "train", ShardSpec(boundaries, width, "float32", norm), 64) as writer:
            tokens, mask = tuple(range(T)), (False, *[True] * (T - 1))
            aux, last = torch.ones(T, len(boundaries) * width), torch.ones(T, width)
            response = Response("a", "c", "train", tokens, mask, 1, T - 1, "stop")
            writer.add(HiddenStates("a", tokens, aux, last, norm), response)

    return write


def specforge(directory: Path) -> None:
    torch.save({"input_ids": torch.arange(T)}, directory / "data_0.ckpt")


def text(directory: Path) -> None:
    (directory / "data_0.ckpt").write_text("no tensors")


def cut(directory: Path) -> None:
    vllm()(directory)
    file = directory / "hs_0.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def two(directory: Path) -> None:
    specforge(directory)
    vllm()(directory)


USABLE = {"vllm": (vllm(), True), "ours": (shards(), False), "specforge": (specforge, False)}
WRONG = {
    "nothing": (lambda _: None, True, "has no .safetensors, .ckpt"),
    "two formats": (two, True, "has files of specforge and vllm"),
    "fewer boundaries": (vllm(columns=3), True, "should be [tokens, 4, 32]: 3 boundaries"),
    "another target's": (vllm(width=64), True, "should be [tokens, 4, 32]"),
    "other tensors": (vllm(hidden_states="states"), True, "has no tensor hidden_states; it holds"),
    "a torn file": (cut, True, "is not a whole safetensors file"),
    "no masks anywhere": (vllm(), False, "have no loss masks: name the texts"),
    "our shards of other boundaries": (shards((1, 2, 4)), False, "has boundaries [1, 2, 4], the config says [1, 3, 4]"),
    "our shards of another target": (shards(width=16), False, "has states 16 wide, the target's are 32"),
    "no tensors": (text, False, "is no file of torch.save"),
}


def checked(directory: Path, target: Target, has_texts: bool, tmp_path: Path) -> None:
    overrides = ["target=directory", f"target.path={target.path}", "target.aux_layer_ids=[1,3,4]",
                 f"hidden_states.from={directory}"]  # fmt: skip
    if has_texts:
        (tmp_path / "texts.jsonl").write_text("{}")
        overrides.append(f"responses.from={tmp_path / 'texts.jsonl'}")
    check(cells(overrides, multirun=False)[0].config)


@pytest.mark.parametrize("kind", USABLE)
def test_a_dump_that_could_be_trained_on_passes(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    write, has_texts = USABLE[kind]
    (tmp_path / "dump").mkdir()
    write(tmp_path / "dump")
    checked(tmp_path / "dump", tiny_target, has_texts, tmp_path)


@pytest.mark.parametrize("kind", WRONG)
def test_a_dump_that_cannot_is_refused_before_any_work(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    write, has_texts, message = WRONG[kind]
    (tmp_path / "dump").mkdir()
    write(tmp_path / "dump")
    with pytest.raises(ConfigError, match=r"hidden_states\.from=") as error:
        checked(tmp_path / "dump", tiny_target, has_texts, tmp_path)
    assert message in str(error.value)


def test_a_format_is_its_files_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "data_0.ckpt.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "a" / "log.txt").write_text("")
    assert dump_files.find(tmp_path) == dump_files.DumpFiles("specforge", (), (tmp_path / "a" / "data_0.ckpt.gz",))
