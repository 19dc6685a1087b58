"""Corrected checkpoints: what is written, what is linked, and that engines then read what was found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3x.capture import Reader, predicted_boundaries
from eagle3x.config import TargetConfig
from eagle3x.diagnosis.corrected import corrected
from eagle3x.diagnosis.hypotheses import FC, Hypothesis, Reading, changed, hypotheses, norm_name, offset, readable
from eagle3x.diagnosis.known_answer import BLOCKS, BOUNDARIES, build
from eagle3x.diagnosis.vocabulary_maps import written
from eagle3x.drafters.checkpoint import EMBEDDING, Published, load, read, write
from eagle3x.targets import Target, resolve
from eagle3x.types import EagleError

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    known = build(tmp_path_factory.mktemp("known"))
    return resolve(
        TargetConfig(
            name="known", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
            trust_remote_code=False, aux_layer_ids=BOUNDARIES,
        )
    )  # fmt: skip


@pytest.fixture
def published(target: Target) -> Published:
    return read(target.path.parent / "drafter")


def change(kind: str, **what: object) -> Hypothesis:
    return Hypothesis(kind, kind, "wrong", "repair", **what)  # type: ignore[arg-type]


def config_of(directory: Path) -> dict[str, object]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def test_flags_ids_and_rope_are_config_alone(published: Published, target: Target, tmp_path: Path) -> None:
    found = [
        change("norm_variant", arch={"norm_before_residual": True}),
        offset((2, 4, 7), "its config says other ones"),
        change("rope_base", arch={"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ]
    done = corrected(published, found, target, tmp_path / "out")
    before, after = config_of(Path(published.where)), config_of(tmp_path / "out")
    assert done.tensors == ()
    assert (tmp_path / "out" / WEIGHTS).samefile(Path(published.where) / WEIGHTS)
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set(done.keys)
    assert set(done.keys) == {
        "norm_before_residual", "rope_theta", "rope_scaling", "eagle_aux_hidden_state_layer_ids", "eagle_config"
    }  # fmt: skip
    for reader in (Reader("vllm", runner="v1"), Reader("sglang", "0.5.23", "LlamaForCausalLM")):
        assert predicted_boundaries(reader, after, BLOCKS) == (2, 4, 7)
    again = read(tmp_path / "out").arch
    assert again == replace(
        published.arch, norm_before_residual=True, rope_theta=500.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )  # fmt: skip


def test_other_names_of_a_key_do_not_survive(published: Published, target: Target, tmp_path: Path) -> None:
    """transformers 5's rope_parameters, and eagle_config's norm_before_fc, would win over what is written."""
    source = tmp_path / "source"
    config = {key: value for key, value in published.config.items() if key != "rope_theta"}
    config |= {
        "rope_parameters": {"rope_theta": 10.0, "rope_type": "default"},
        "eagle_config": {"norm_before_fc": True, "use_aux_hidden_state": True},
    }
    write(source, {**published.tensors, "input_norm.weight": torch.ones(384)}, config)
    found = [
        change("rope_base", arch={"rope_theta": 10000.0, "rope_scaling": None}),
        change("norm_variant", arch={"norm_before_fc": False}, tensors={"input_norm.weight": None}),
    ]
    done = corrected(read(source), found, target, tmp_path / "out")
    assert read(tmp_path / "out").arch == published.arch
    assert done.tensors == ("input_norm.weight",)
    assert config_of(tmp_path / "out")["eagle_config"] == {"use_aux_hidden_state": True}


def test_tensors_are_rewritten_and_the_others_kept(published: Published, target: Target, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    fc, d2t = published.tensors[FC], published.tensors["d2t"]
    swapped = fc.unflatten(1, (3, -1))[:, [2, 0, 1]].flatten(1)
    random = torch.randn(64, 128)
    write(wrong, {**published.tensors, FC: swapped, EMBEDDING: random, "d2t": d2t - 1}, published.config)
    ids = torch.arange(63) + d2t
    found = [
        change("columns_swapped", columns=(1, 2, 0)),  # where the columns of each boundary, ascending, stand
        change("random_embedding", tensors={EMBEDDING: None}),
        change("d2t_shifted", tensors=written(ids, 64)),
    ]
    done = corrected(read(wrong), found, target, tmp_path / "out")
    before, after = load_file(Path(published.where) / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert done.tensors == ("d2t", EMBEDDING, FC, "t2d")
    assert done.keys == ()
    assert torch.equal(load(tmp_path / "out", target).embed_tokens.weight, target.embedding())


def test_norms_get_the_weights_dtype(published: Published, target: Target, tmp_path: Path) -> None:
    half = tmp_path / "half"
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in published.tensors.items()}
    write(half, tensors, published.config)
    norms = {norm_name(j): target.final_norm() for j in range(3)}
    corrected(read(half), [change("normed_states", arch={"fc_norm": True}, tensors=norms)], target, tmp_path / "out")
    after = load_file(tmp_path / "out" / WEIGHTS)
    assert {after[name].dtype for name in norms} == {torch.bfloat16}
    assert config_of(tmp_path / "out")["fc_norm"] is True


def test_whatever_the_finder_may_name_can_be_written(published: Published, target: Target, tmp_path: Path) -> None:
    """Each change alone; some give one tensor to several norms, or a part of another one."""
    reading = Reading(readable(published), BOUNDARIES)
    kinds = set()
    for i, hypothesis in enumerate(hypotheses(reading, published, target, range(1, BLOCKS), 3)):
        if hypothesis.last_column:
            continue
        corrected(published, [hypothesis], target, tmp_path / str(i))
        written_there = load(tmp_path / str(i), target).state_dict()
        for name, tensor in changed(published, hypothesis).tensors.items():
            assert torch.equal(written_there[name], tensor.to(written_there[name].dtype)), (hypothesis.name, name)
        kinds.add(hypothesis.kind)
    assert kinds >= {"normed_states", "inputs_swapped", "rotary_layout", "columns_swapped", "d2t_shifted"}


def test_what_cannot_be_corrected(published: Published, target: Target, tmp_path: Path) -> None:
    flag = change("norm_variant", arch={"norm_output": True})
    with pytest.raises(EagleError, match="nothing was found"):
        corrected(published, [], target, tmp_path / "out")
    with pytest.raises(EagleError, match="no checkpoint can say this"):
        corrected(published, [flag, change("normed_states", last_column=True)], target, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(EagleError, match="is not empty"):
        corrected(published, [flag], target, tmp_path)
    assert not (tmp_path / "out").exists()
