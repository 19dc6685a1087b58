"""Round trips to the bit, and every way in which a checkpoint can be wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3x.drafters import checkpoint
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.targets import Target
from eagle3x.types import EagleError

ARCH = Architecture(
    hidden_size=32, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
    rope_theta=10000.0, max_position_embeddings=512, vocab_size=128, draft_vocab_size=8, target_hidden_size=32,
    num_aux=3, norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip


def drafter(target: Target, **changes: bool | int) -> Eagle3:
    torch.manual_seed(0)
    model = Eagle3(dataclasses.replace(ARCH, **changes))  # type: ignore[arg-type]
    ids = torch.arange(model.arch.draft_vocab_size) * 3
    if model.arch.draft_vocab_size == 8:
        model.d2t.copy_(ids - torch.arange(8))
        model.t2d.fill_(False)[ids] = True
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.embedding())
    return model


@pytest.mark.parametrize("variant", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", None])
def test_round_trip_is_exact(tiny_target: Target, tmp_path: Path, variant: str | None) -> None:
    model = drafter(tiny_target, **({variant: True} if variant else {}))
    checkpoint.save(model, tmp_path, {"eagle_config": {"use_aux_hidden_state": True}})
    again = checkpoint.load(tmp_path, tiny_target)
    assert again.arch == model.arch
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.dtype == theirs[name].dtype
    assert {n for n, p in again.named_parameters() if not p.requires_grad} == {"embed_tokens.weight"}
    assert "embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["eagle_config"] == {"use_aux_hidden_state": True}


def test_names_and_shapes_are_those_that_engines_load(tiny_target: Target, tmp_path: Path) -> None:
    checkpoint.save(drafter(tiny_target, fc_norm=True), tmp_path, {})
    shapes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert shapes == {
        "fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (8, 32), "d2t": (8,), "t2d": (128,),
        "fc_norm.0.weight": (32,), "fc_norm.1.weight": (32,), "fc_norm.2.weight": (32,),
        "midlayer.input_layernorm.weight": (32,), "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64), "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64), "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (24, 32), "midlayer.mlp.up_proj.weight": (24, 32),
        "midlayer.mlp.down_proj.weight": (32, 24),
    }  # fmt: skip


@pytest.fixture
def edited(tiny_target: Target, tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], object]], Path]:
    """A saved drafter whose tensors were changed by a function."""

    def edit(change: Callable[[dict[str, Tensor]], object]) -> Path:
        checkpoint.save(drafter(tiny_target), tmp_path, {})
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return edit


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("midlayer.mlp.up_proj.weight"), r"lacks midlayer\.mlp\.up_proj\.weight.*initialised"),
    "unknown": (lambda t: t.update(extra=torch.ones(1)), "no place for: extra"),
    "shape": (lambda t: t.update({"fc.weight": torch.ones(32, 64)}), r"fc\.weight is \[32, 64\], .* \[32, 96\]"),
    "no d2t": (lambda t: t.pop("d2t"), "has no d2t"),
    "stale": (lambda t: t["t2d"].copy_(t["t2d"].roll(1)), "stale vocabulary"),
    "target ids instead of offsets": (lambda t: t["d2t"].copy_(torch.arange(8) * 18), "offsets"),
    "two draft tokens for one": (lambda t: t["d2t"].copy_(-torch.arange(8)), "8 different ids"),
    "float d2t": (lambda t: t.update(d2t=t["d2t"].float()), "integer offsets"),
    "nan": (lambda t: t["fc.weight"].view(-1)[5].fill_(float("nan")), r"fc\.weight has values that are not finite"),
    "both names": (lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(32)}), "there twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(
    fault: str, edited: Callable[[Callable[[dict[str, Tensor]], object]], Path], tiny_target: Target
) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(EagleError, match=message):
        checkpoint.load(edited(change), tiny_target)


def test_other_name_of_the_block_and_missing_t2d(
    edited: Callable[[Callable[[dict[str, Tensor]], object]], Path], tiny_target: Target
) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        del tensors["t2d"]
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    again = checkpoint.load(edited(rename), tiny_target)
    for name, tensor in drafter(tiny_target).state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_whole_vocabulary_needs_no_map_and_its_own_embedding_is_kept(tiny_target: Target, tmp_path: Path) -> None:
    model = drafter(tiny_target, draft_vocab_size=128)
    checkpoint.save(model, tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    tensors["embed_tokens.weight"] = torch.full((128, 32), 0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    again = checkpoint.load(tmp_path, tiny_target)
    assert again.target_ids().tolist() == list(range(128))
    assert torch.equal(again.embed_tokens.weight, tensors["embed_tokens.weight"])


def test_of_another_target_or_no_checkpoint(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"has no config\.json"):
        checkpoint.load(tmp_path, tiny_target)
    checkpoint.save(drafter(tiny_target), tmp_path, {"vocab_size": 999})
    with pytest.raises(EagleError, match=r"vocab_size is 999, but tiny has 128"):
        checkpoint.load(tmp_path, tiny_target)
    checkpoint.save(drafter(tiny_target), tmp_path, {})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(EagleError, match="pickles"):
        checkpoint.load(tmp_path, tiny_target)


def test_republish_keeps_every_bit_the_dtype_and_the_layer_ids(tiny_target: Target, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    model = drafter(tiny_target).to(torch.bfloat16)
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_last_layernorm": True}}
    checkpoint.save(model, source, {**ids, "initializer_range": 0.02})
    checkpoint.republish(checkpoint.read(source), out, tiny_target)
    ours, theirs = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == theirs[n].dtype for n in ours)
    assert ours["fc.weight"].dtype == torch.bfloat16
    config = json.loads((out / "config.json").read_text())
    assert config == {**model.arch.to_config(), "torch_dtype": "bfloat16", **ids}


def test_a_head_that_is_the_targets_is_written_for_vllm(tiny_target: Target, tmp_path: Path) -> None:
    """SGLang shares the target's head where the config names no draft vocabulary; vLLM has no such rule."""
    source, out = tmp_path / "source", tmp_path / "out"
    checkpoint.save(drafter(tiny_target, draft_vocab_size=128), source, {"draft_vocab_size": None})
    tensors = load_file(source / "model.safetensors")
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    save_file(tensors, source / "model.safetensors")
    checkpoint.republish(checkpoint.read(source), out, tiny_target)
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], tiny_target.head())


def test_an_embedding_of_another_model_is_told_from_the_targets(tiny_target: Target) -> None:
    model = drafter(tiny_target)
    assert checkpoint.embedding_likeness(model, tiny_target) == pytest.approx(1)
    with torch.no_grad():
        model.embed_tokens.weight.normal_()
    likeness = checkpoint.embedding_likeness(model, tiny_target)
    assert likeness is not None
    assert likeness < checkpoint.UNRELATED
