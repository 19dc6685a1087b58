"""Each kind of column is planted once in a dump, and named right; what cannot be trained on is refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3x.data.dumps import Dump
from eagle3x.diagnosis.dump_probe import DumpVerdict, probe_dump
from eagle3x.diagnosis.reference import Candidate, Kind, Reference, reference_model, run_reference
from eagle3x.targets import Target
from eagle3x.types import EagleError

TEXTS = [[3 + (i * step) % 120 for i in range(length)] for step, length in ((11, 40), (7, 30), (13, 12), (17, 36))]
"""The third has too few tokens for the probe."""


@pytest.fixture(scope="module")
def target(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny target with norms of their own: else all norms are one."""
    path = shutil.copytree(tiny_target.path, tmp_path_factory.mktemp("targets") / "normed")
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() == 1:
            weights[name] = weight + torch.rand(weight.shape, generator=generator) - 0.5
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return dataclasses.replace(tiny_target, path=path)


@pytest.fixture(scope="module")
def references(target: Target) -> list[Reference]:
    model = reference_model(target)
    return [run_reference(model, text) for text in TEXTS]


def write(directory: Path, columns: Sequence[Sequence[Tensor]], dtype: torch.dtype = torch.float32) -> Path:
    """A dump of vLLM's connector: per text its columns, the last hidden state last."""
    directory.mkdir(exist_ok=True)
    for number, (text, own) in enumerate(zip(TEXTS, columns, strict=True)):
        states = torch.stack(list(own), dim=1).to(dtype).contiguous()
        save_file({"hidden_states": states, "token_ids": torch.tensor(text)}, directory / f"hs_{number}.safetensors")
    return directory


def verdict(directory: Path, target: Target, samples: int = 3) -> DumpVerdict:
    return probe_dump(Dump(directory, target.hidden_size), target, samples, 32)


KINDS: list[Kind] = [
    "stream", "final_normed", "input_normed", "block_output", "mlp_output", "before_mlp", "row_before", "row_after",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_named(kind: Kind, references: list[Reference], target: Target, tmp_path: Path) -> None:
    """In float16, beside a boundary that is right."""
    columns = [[r.of(1), r.of(3, kind), r.of(6, "final_normed")] for r in references]
    found = verdict(write(tmp_path / "dump", columns, torch.float16), target)
    assert found.samples == 3
    assert [c.found for c in found.columns] == [Candidate(1, "stream"), Candidate(3, kind)]
    assert found.columns[0].dtype == "float16"
    assert found.usable == (kind == "stream")
    assert str(Candidate(3, kind)) in found.describe()
    assert ("'target.aux_layer_ids=[1,3]' capture=as_is" in found.describe()) == (kind == "stream")


@pytest.mark.parametrize(("kind", "norm"), [("stream", "pre_norm"), ("final_normed", "post_norm")])
def test_the_last_state_is_before_or_after_the_norm(
    kind: Kind, norm: str, references: list[Reference], target: Target, tmp_path: Path
) -> None:
    found = verdict(write(tmp_path / "dump", [[r.of(2), r.of(6, kind)] for r in references]), target)
    assert (found.last_norm, found.usable) == (norm, True)
    other = verdict(write(tmp_path / "dump", [[r.of(2), r.of(5)] for r in references]), target)
    assert (other.last_norm, other.usable) == (None, False)
    assert "last (float32): boundary 5" in other.describe()


def test_another_order_is_said(references: list[Reference], target: Target, tmp_path: Path) -> None:
    columns = [[r.of(4), r.of(1), r.of(3), r.of(6)] for r in references]
    found = verdict(write(tmp_path / "dump", columns), target)
    assert (found.boundaries, found.usable) == ((4, 1, 3), True)
    assert "not ascending: they are put in the order [1, 3, 4]" in found.describe()
    twice = verdict(write(tmp_path / "dump", [[r.of(4), r.of(4), r.of(6)] for r in references]), target)
    assert (twice.boundaries, twice.usable) == ((4, 4), False)


def test_a_sample_that_is_otherwise_is_found(references: list[Reference], target: Target, tmp_path: Path) -> None:
    """The last of four texts was extracted one block late."""
    columns = [[r.of(3), r.of(6)] for r in references[:3]] + [[references[3].of(4), references[3].of(6)]]
    directory = write(tmp_path / "dump", columns)
    found = verdict(directory, target, 3)
    assert found.columns[0].found is None
    assert not found.usable
    assert "NOT THE SAME in each sample: boundary 3, boundary 4" in found.describe()
    assert verdict(directory, target, 1).usable  # one sample cannot tell


def test_states_of_another_text_are_near_nothing(references: list[Reference], target: Target, tmp_path: Path) -> None:
    columns = [[torch.randn(len(text), 32), r.of(6)] for text, r in zip(TEXTS, references, strict=True)]
    found = verdict(write(tmp_path / "dump", columns), target)
    assert not found.usable
    assert "NOTHING KNOWN is near" in found.describe()
    assert found.as_dict()["boundaries"] is None


def test_what_cannot_be_compared(references: list[Reference], target: Target, tmp_path: Path) -> None:
    columns = [[r.of(3), r.of(6)] for r in references]
    columns[0][0] = columns[0][0] * 1e30
    with pytest.raises(EagleError, match=r"column 0 has values that are not finite in torch\.float16"):
        verdict(write(tmp_path / "dump", columns, torch.float16), target)
    short = tmp_path / "short"
    short.mkdir()
    states = {"hidden_states": torch.ones(12, 2, 32), "token_ids": torch.arange(12)}
    save_file(states, short / "a.safetensors")
    with pytest.raises(EagleError, match="no sample has the 20 tokens"):
        verdict(short, target)
    save_file({"hidden_states": torch.ones(30, 2, 32), "token_ids": torch.arange(110, 140)}, short / "a.safetensors")
    with pytest.raises(EagleError, match="token ids up to 139, but tiny has 128"):
        verdict(short, target)
    save_file({"hidden_states": torch.ones(30, 2, 16), "token_ids": torch.arange(30)}, short / "a.safetensors")
    with pytest.raises(EagleError, match="16 wide, but tiny's are 32"):
        verdict(short, target)


def test_of_the_same_vectors_the_boundary_is_named(tiny_target: Target, tmp_path: Path) -> None:
    """A block whose MLP writes nothing: its boundary is also the stream without the MLP's output."""
    path = shutil.copytree(tiny_target.path, tmp_path / "target")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"].zero_()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    target = dataclasses.replace(tiny_target, path=path)
    model = reference_model(target)
    references = [run_reference(model, text) for text in TEXTS]
    columns = [[r.of(3, "before_mlp"), r.of(6, "final_normed")] for r in references]
    assert verdict(write(tmp_path / "dump", columns), target).boundaries == (3,)
