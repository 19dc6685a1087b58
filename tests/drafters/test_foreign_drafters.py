"""Drafters that other trainers saved: the same logits as in their own code, to our format and back bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3x.capture import Reader, predicted_boundaries
from eagle3x.drafters import checkpoint, origin, speculators_format
from eagle3x.drafters.architecture import Architecture, MadeBy
from eagle3x.drafters.config import Drafter
from eagle3x.kernels.layout import layout_of
from eagle3x.targets import Target
from eagle3x.types import ConfigError, EagleError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "drafters"
MADE_BY: dict[str, MadeBy | None] = {
    "speculators-llama3": None, "speculators-norms": None,
    "specforge-yarn": "specforge", "specforge-norms": "specforge",
}  # fmt: skip
KEY = "eagle_aux_hidden_state_layer_ids"
PRETRAINED = Drafter(
    source="pretrained", path="/ckpt", hub_id=None, revision=None, allow_bin=False, made_by=None, boundaries=None,
    init_from=None, init="random", num_layers=1, intermediate_size=None, draft_vocab_size=40,
    norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip


def known_of(name: str) -> dict[str, torch.Tensor]:
    """What the trainer's own code computes."""
    return load_file(FIXTURES / f"{name}.known.safetensors")


def worst(directory: Path, target: Target, made_by: MadeBy | None, known: dict[str, torch.Tensor]) -> float:
    """The largest difference between our logits and the trainer's, over all rows that are no padding."""
    drafter = checkpoint.load(directory, target, made_by)
    tokens, length = known["tokens"], len(known["tokens"])
    with torch.no_grad():
        states = drafter.ttt(known["aux"], tokens, layout_of(torch.arange(length), [length]), len(known["logits"]))
        ours = [drafter.unit_logits(state) for state in states]
    return max(
        float((mine - theirs)[: length - 1 - step].abs().max())
        for step, (mine, theirs) in enumerate(zip(ours, known["logits"], strict=True))
    )


@pytest.mark.parametrize("name", MADE_BY)
def test_the_same_logits_as_in_the_trainers_own_code(name: str, tiny_target: Target) -> None:
    known = known_of(name)
    assert known["logits"].std() > 1
    assert worst(FIXTURES / name, tiny_target, MADE_BY[name], known) < 2e-4


def test_what_specforge_calls_norm_output_is_not_what_engines_call_so(tiny_target: Target) -> None:
    """Read as engines read it, the later steps of this drafter are others."""
    known = known_of("specforge-norms")
    assert worst(FIXTURES / "specforge-norms", tiny_target, None, known) > 0.5
    raw = json.loads((FIXTURES / "specforge-norms" / "config.json").read_text())
    with pytest.raises(EagleError, match="head without a norm"):
        Architecture.from_config({**raw, "norm_output": False}, "specforge")


@pytest.mark.parametrize("name", MADE_BY)
def test_to_our_format_and_to_speculators_and_back(name: str, tiny_target: Target, tmp_path: Path) -> None:
    """Same tensors at each station, same architecture, same logits at the end."""
    known = known_of(name)
    source = checkpoint.read(FIXTURES / name, MADE_BY[name])
    checkpoint.republish(source, tmp_path / "ours", tiny_target)
    ours = checkpoint.read(tmp_path / "ours")
    there = tmp_path / "speculators"
    config = speculators_format.config(ours.arch, ours.dtype, (1, 3, 4), tiny_target, 3)
    checkpoint.write(there, speculators_format.tensors(ours.tensors, ours.arch), config)
    assert "layers.0.self_attn.q_proj.weight" in load_file(there / "model.safetensors")
    back = checkpoint.read(there)
    for other in (ours, back):
        assert other.arch == source.arch
        assert other.tensors.keys() == source.tensors.keys()
        for key, tensor in source.tensors.items():
            assert other.tensors[key].dtype == tensor.dtype
            assert torch.equal(other.tensors[key], tensor), key
    assert back.dtype == "bfloat16"
    assert worst(there, tiny_target, None, known) < 2e-4
    assert origin.of(PRETRAINED, back.config, 6).boundaries == (1, 3, 4)


def test_a_whole_vocabulary_has_no_map_in_speculators(tiny_target: Target) -> None:
    tensors = {"d2t": torch.zeros(1), "t2d": torch.zeros(1), "midlayer.mlp.up_proj.weight": torch.zeros(1)}
    arch = checkpoint.read(FIXTURES / "specforge-yarn", "specforge").arch
    whole = Architecture(**{**arch.__dict__, "draft_vocab_size": 128})
    assert list(speculators_format.tensors(tensors, whole)) == ["layers.0.mlp.up_proj.weight"]
    assert len(speculators_format.tensors(tensors, arch)) == 3


def copy(name: str, to: Path, config: dict[str, Any] | None = None, rename: Any = None) -> Path:
    """A fixture with other config keys, and its weights under other names."""
    shutil.copytree(FIXTURES / name, to)
    file = to / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))
    if rename is not None:
        tensors = load_file(to / "model.safetensors")
        save_file({rename(key): tensor for key, tensor in tensors.items()}, to / "model.safetensors")
    return to


MODELOPT = {  # keys that its exporter writes (hf_spec_configs.py), with what its Llama drafters have
    "eagle_config": {
        KEY: [0, 2, 3], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    },
    "attention_dropout": 0.0, "pretraining_tp": 1, "initializer_range": 0.02,
}  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "config"),
    [("layers.0.", MODELOPT), ("model.layers.0.", {"num_aux_hidden_states": 3, "eagle_config": None})],
    ids=["modelopt", "automodel"],
)
def test_other_names_of_the_same_weights(
    prefix: str, config: dict[str, Any], tiny_target: Target, tmp_path: Path
) -> None:
    def rename(name: str) -> str:
        outer = (
            "model." if prefix.startswith("model.") and name.partition(".")[0] not in ("lm_head", "d2t", "t2d") else ""
        )
        return name.replace("midlayer.", prefix) if name.startswith("midlayer.") else outer + name

    known = known_of("specforge-yarn")
    there = copy("specforge-yarn", tmp_path / "there", config, rename)
    assert worst(there, tiny_target, None, known) < 2e-4


def test_a_bin_file_is_read_only_if_asked_and_only_its_tensors(tiny_target: Target, tmp_path: Path) -> None:
    there = copy("specforge-yarn", tmp_path / "there")
    weights = load_file(there / "model.safetensors")
    (there / "model.safetensors").unlink()
    torch.save(weights, there / "pytorch_model.bin")
    with pytest.raises(EagleError, match=r"pickles \(drafter.allow_bin=true\)"):
        checkpoint.load(there, tiny_target)
    known = known_of("specforge-yarn")
    read = checkpoint.read(there, allow_bin=True)
    assert all(torch.equal(read.tensors[key], tensor) for key, tensor in weights.items())
    checkpoint.republish(read, tmp_path / "ours", tiny_target)
    assert worst(tmp_path / "ours", tiny_target, None, known) < 2e-4
    torch.save({"code": Path}, there / "pytorch_model.bin")  # anything but a tensor
    with pytest.raises(EagleError, match="cannot be read as tensors alone"):
        checkpoint.read(there, allow_bin=True)
    torch.save({"step": 3}, there / "pytorch_model.bin")
    with pytest.raises(EagleError, match="other things than named tensors"):
        checkpoint.read(there, allow_bin=True)


REFUSED = {
    "unknown key": ({"sink_scale": 2.0}, "sink_scale=2.0 is not known"),
    "EAGLE-1": ({"eagle_config": {"use_aux_hidden_state": False}}, "false is EAGLE-1"),
    "P-EAGLE": ({"parallel_drafting": True}, "P-EAGLE"),
    "MLA": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "other models"),
    "EAGLE-1's class": ({"architectures": ["LlamaForCausalLM"]}, "not supported"),
    "window": ({"layer_types": ["sliding_attention"]}, "no window"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "unquantized"),
    "two blocks": ({"num_hidden_layers": 2}, "deeper"),
    "dynamic RoPE": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of type dynamic"),
    "mrope": ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 1]}}, "mrope_section"),
    "half a llama3": ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_would_be_served_wrong_is_refused(fault: str) -> None:
    raw = json.loads((FIXTURES / "specforge-yarn" / "config.json").read_text())
    change, message = REFUSED[fault]
    with pytest.raises(EagleError, match=message):
        Architecture.from_config({**raw, **change})


def test_what_speculators_and_vllm_take_for_different_things_must_be_said() -> None:
    raw = json.loads((FIXTURES / "speculators-llama3" / "config.json").read_text())
    del raw["norm_before_residual"]
    with pytest.raises(EagleError, match="speculators takes it for false, and vLLM for true"):
        Architecture.from_config(raw)


def test_query_norms_have_no_place(tiny_target: Target, tmp_path: Path) -> None:
    there = copy("speculators-llama3", tmp_path / "there")
    tensors = load_file(there / "model.safetensors")
    tensors["layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    save_file(tensors, there / "model.safetensors")
    with pytest.raises(EagleError, match=r"no place for: midlayer\.self_attn\.q_norm\.weight"):
        checkpoint.load(there, tiny_target)


def said(**of: Any) -> Drafter:
    return Drafter(**{**PRETRAINED.__dict__, **of})


NESTED, TOP = {"eagle_config": {KEY: [2, 30, 58]}}, {KEY: [2, 30, 58]}


@pytest.mark.parametrize(
    ("cfg", "raw", "boundaries"),
    [
        (said(boundaries=(3, 31, 59)), NESTED, (3, 31, 59)),
        (said(boundaries=(3, 31, 59)), {}, (3, 31, 59)),
        (said(), TOP, (2, 30, 58)),
        (said(), {**NESTED, KEY: [3, 31, 59]}, (3, 31, 59)),
        (said(made_by="specforge"), NESTED, (3, 31, 59)),
        (said(made_by="modelopt"), NESTED, (3, 31, 59)),
        (said(), {**TOP, "speculators_model_type": "eagle3"}, (2, 30, 58)),
        (said(made_by="eagle"), {}, (2, 30, 58)),
        (said(), NESTED, None),
        (said(), {}, None),
        (said(made_by="specforge"), {}, None),
    ],
)
def test_boundaries_are_those_that_somebody_said(
    cfg: Drafter, raw: dict[str, Any], boundaries: tuple[int, ...] | None
) -> None:
    found = origin.of(cfg, raw, 61)
    assert found.boundaries == boundaries
    assert found.said_by
    if boundaries is None:
        assert "drafter.boundaries=[" in found.said_by


def test_what_to_say_is_said() -> None:
    assert "drafter.boundaries=[2,30,58] or [3,31,59]" in origin.of(said(), NESTED, 61).said_by
    assert "[2,30,58] here" in origin.of(said(), {}, 61).said_by
    with pytest.raises(ConfigError, match=r"outside 0\.\.50"):
        origin.of(said(boundaries=(2, 30, 58)), NESTED, 50)


def test_an_automodel_id_means_the_boundary_after_it() -> None:
    assert predicted_boundaries(Reader("automodel"), {KEY: [1, 13, 26]}, 30) == (2, 14, 27)
