"""Targets: facts, tensors and identity from the files; directories that are no target are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3x.config import TargetConfig
from eagle3x.targets import Target, check, require_same, resolve
from eagle3x.types import ConfigError, EagleError


def target_config(path: Path, aux_layer_ids: tuple[int, ...] = (1, 3, 4)) -> TargetConfig:
    return TargetConfig(path.name, str(path), None, None, None, False, aux_layer_ids)


@pytest.fixture
def copy(tiny_target: Target, tmp_path: Path) -> Path:
    """A copy of the tiny target to be changed."""
    return Path(shutil.copytree(tiny_target.path, tmp_path / "copy"))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def at(path: Path, aux_layer_ids: tuple[int, ...] = (1, 3, 4)) -> Target:
    return resolve(target_config(path, aux_layer_ids))


# ---- facts


def test_facts_of_the_tiny_target(tiny_target: Target) -> None:
    t = tiny_target
    assert (t.name, t.model_class, t.model_type, t.num_blocks) == ("tiny", "LlamaForCausalLM", "llama", 6)
    assert (t.hidden_size, t.intermediate_size, t.num_heads, t.num_kv_heads, t.head_dim) == (32, 64, 4, 2, 8)
    assert (t.vocab_size, t.rms_norm_eps, t.rope_theta, t.max_position_embeddings) == (128, 1e-5, 10000.0, 512)
    assert (t.eos_token_ids, t.aux_layer_ids, t.dtype) == ((2,), (1, 3, 4), "float32")
    assert t.chat_template == (t.path / "chat_template.jinja").read_text() != ""


def test_tokenizer_and_template_of_the_tiny_target(tiny_target: Target) -> None:
    text = tiny_target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    # 3 special tokens, newline at 3, then ASCII from the space at 4.
    assert tiny_target.tokenizer("a b<|im_end|>").input_ids == [4 + 65, 4, 4 + 66, 2]
    assert tiny_target.tokenizer.decode([69, 4, 70]) == "a b"


def test_facts_in_older_and_nested_configs(copy: Path) -> None:
    def older(config: dict[str, Any]) -> None:
        del config["rope_parameters"], config["head_dim"], config["num_key_value_heads"]
        config["torch_dtype"] = config.pop("dtype")
        config["rope_theta"] = 5e5

    edit(copy / "config.json", older)
    t = at(copy)
    assert (t.rope_theta, t.head_dim, t.num_kv_heads, t.dtype) == (5e5, 8, 4, "float32")

    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    del config["rope_theta"]
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (copy / "config.json").write_text(json.dumps(nested))
    t = at(copy)
    assert (t.model_class, t.model_type, t.num_blocks, t.rope_theta) == (
        "Gemma3ForConditionalGeneration", "llama", 6, 1e6
    )  # fmt: skip


def test_stop_tokens_are_those_of_the_generation_config(copy: Path) -> None:
    edit(copy / "generation_config.json", lambda c: c.update(eos_token_id=[2, 7]))
    assert at(copy).eos_token_ids == (2, 7)
    (copy / "generation_config.json").unlink()
    assert at(copy).eos_token_ids == (2,)
    edit(copy / "config.json", lambda c: c.pop("eos_token_id"))
    with pytest.raises(ConfigError, match="no eos_token_id"):
        at(copy)


# ---- bad input


def test_check_needs_no_torch(tiny_target: Target) -> None:
    script = f"""
        import sys
        from eagle3x.config import TargetConfig
        from eagle3x.targets import check, resolve
        cfg = TargetConfig("t", {str(tiny_target.path)!r}, None, None, None, False, (1, 3, 4))
        check(cfg)
        resolve(cfg).identity()
        heavy = [m for m in ("torch", "transformers", "huggingface_hub") if m in sys.modules]
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_refuses_paths_that_are_no_target(copy: Path, tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        for look in (check, resolve):
            with pytest.raises(ConfigError, match=message):
                look(target_config(path))

    refused(Path("/nowhere"), "target.path=/nowhere does not exist")
    refused(tmp_path / "cpoy", f"cpoy does not exist: did you mean {copy}")
    refused(copy / "config.json", "is a file: name the directory")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refused(copy, r"\.bin only, .* save them as safetensors")
    (copy / "pytorch_model.bin").unlink()
    refused(copy, "has no weights")
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2-of-2.safetensors"}}')
    refused(copy, "lacks model-2-of-2.safetensors")
    shutil.copy(copy / "tokenizer.json", copy / "model-2-of-2.safetensors")
    check(target_config(copy))
    (copy / "tokenizer.json").unlink()
    refused(copy, "has no tokenizer")
    (copy / "config.json").write_text("{")
    refused(copy, "not valid JSON")
    (copy / "config.json").unlink()
    refused(copy, "no config.json")


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_parameters", "architectures"]
)
def test_refuses_a_config_without_a_fact(copy: Path, key: str) -> None:
    edit(copy / "config.json", lambda c: c.pop(key))
    with pytest.raises(ConfigError, match=key.replace("rope_parameters", "rope_theta")):
        check(target_config(copy))


def test_refuses_layers_the_target_does_not_have(tiny_target: Target) -> None:
    check(target_config(tiny_target.path, (0, 3, 6)))
    for ids in ((1, 3, 7), (-1, 3)):
        with pytest.raises(ConfigError, match=r"within 0\.\.6: .* has 6 blocks \(most drafters use \[2, 3, 3\]\)"):
            check(target_config(tiny_target.path, ids))


# ---- tensors


def test_tensors_of_an_untied_target(tiny_target: Target) -> None:
    stored = load_file(tiny_target.path / "model.safetensors")
    assert torch.equal(tiny_target.embedding(), stored["model.embed_tokens.weight"])
    assert torch.equal(tiny_target.head(), stored["lm_head.weight"])
    assert torch.equal(tiny_target.final_norm(), stored["model.norm.weight"])
    assert not torch.equal(tiny_target.head(), tiny_target.embedding())


@pytest.mark.parametrize("style", ["language_model.model", "model.language_model"])
def test_tensors_of_a_sharded_multimodal_checkpoint_in_bfloat16(copy: Path, style: str) -> None:
    stored = {k: v.bfloat16() for k, v in load_file(copy / "model.safetensors").items()}
    named = {
        k.replace("model.", f"{style}.", 1) if k.startswith("model.")
        else ("language_model." if style.startswith("language_model") else "") + k: v
        for k, v in stored.items()
    }  # fmt: skip
    parts = {f"model-0000{i}-of-00003.safetensors": dict(list(named.items())[i - 1 :: 3]) for i in (1, 2, 3)}
    for file, tensors in parts.items():
        save_file(tensors, copy / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (copy / "model.safetensors").unlink()
    t = at(copy)
    for tensor, name in ((t.embedding(), "model.embed_tokens.weight"), (t.head(), "lm_head.weight"),
                         (t.final_norm(), "model.norm.weight")):  # fmt: skip
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, stored[name].float())


def test_the_head_of_tied_targets_is_the_embedding(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(EagleError, match=r"no tensor lm_head.weight"):
        at(copy).head()  # the config says untied: the checkpoint lacks it
    edit(copy / "config.json", lambda c: c.pop("tie_word_embeddings"))
    assert torch.equal(at(copy).head(), tensors["model.embed_tokens.weight"])
    # transformers ties although the file has a head of its own, if the config says so.
    save_file({**tensors, "lm_head.weight": head}, copy / "model.safetensors")
    assert torch.equal(at(copy).head(), head)
    edit(copy / "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert torch.equal(at(copy).head(), tensors["model.embed_tokens.weight"])


def test_refuses_tensors_that_are_not_what_the_config_says(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(128, 32, dtype=torch.int8)
    tensors["model.norm.weight"] = torch.ones(16)
    tensors["model.embed_token.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(EagleError, match=r"int8, a quantized tensor"):
        at(copy).head()
    with pytest.raises(EagleError, match=r"final norm is \[16\], config.json says \[32\]"):
        at(copy).final_norm()
    with pytest.raises(EagleError, match=r"no tensor model.embed_tokens.weight .*nearest: model.embed_token.weight"):
        at(copy).embedding()


def test_final_norm_and_head_reproduce_the_logits_of_transformers(tiny_target: Target, tmp_path: Path) -> None:
    """On Llama, and on Gemma, whose norm multiplies by 1 + weight."""
    from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, final_logit_softcapping=None, eos_token_id=1,
        )
    )  # fmt: skip
    torch.nn.init.normal_(gemma.model.norm.weight)
    gemma.save_pretrained(tmp_path)
    shutil.copy(tiny_target.path / "tokenizer.json", tmp_path)
    for target in (tiny_target, at(tmp_path, (1,))):
        model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
        before: list[torch.Tensor] = []
        model.model.norm.register_forward_pre_hook(lambda _, args, kept=before: kept.append(args[0]))
        with torch.no_grad():
            logits = model(torch.tensor([[5, 6, 7, 8]])).logits
        normed = torch.nn.functional.rms_norm(before[0], (target.hidden_size,), eps=target.rms_norm_eps)
        torch.testing.assert_close(normed * target.final_norm() @ target.head().T, logits, rtol=1e-5, atol=1e-5)
    edit(tmp_path / "config.json", lambda c: c.update(final_logit_softcapping=30.0))
    with pytest.raises(EagleError, match="final_logit_softcapping"):
        at(tmp_path, (1,)).head()


# ---- identity


def test_identity_is_content_not_place(tiny_target: Target, copy: Path) -> None:
    assert at(copy).identity() == tiny_target.identity()
    assert set(tiny_target.identity()) == {"weights", "config", "tokenizer", "template"}


def test_identity_ignores_who_wrote_the_files(tiny_target: Target, copy: Path) -> None:
    noise = {"transformers_version": "4.0", "_name_or_path": "/x", "use_cache": False}
    edit(copy / "config.json", lambda c: c.update(noise, torch_dtype=c.pop("dtype")))
    edit(copy / "tokenizer_config.json", lambda c: c.update(name_or_path="/x", is_local=True))
    (copy / "README.md").write_text("a model card")
    assert at(copy).identity() == tiny_target.identity()


def test_a_template_is_the_same_in_either_file(tiny_target: Target, copy: Path) -> None:
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(EagleError, match="no chat template"):
        _ = at(copy).chat_template
    assert at(copy).identity()["template"] is None
    for stored in (template, [{"name": "tool", "template": "x"}, {"name": "default", "template": template}]):
        edit(copy / "tokenizer_config.json", lambda c, stored=stored: c.update(chat_template=stored))
        assert at(copy).chat_template == template
        assert at(copy).identity() == tiny_target.identity()
    (copy / "chat_template.jinja").write_text("another")  # wins, as in transformers
    assert at(copy).chat_template == "another"


def other_weights(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(tensors, path / "model.safetensors")


def other_tokenizer(path: Path) -> None:
    text = (path / "tokenizer.json").read_text()
    assert '"a": 69' in text
    (path / "tokenizer.json").write_text(text.replace('"a": 69', '"a": 70').replace('"b": 70', '"b": 69'))


PLANTED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("weights", other_weights),
    "template": ("template", lambda p: (p / "chat_template.jinja").write_text("{{ messages }}")),
    "tokenizer": ("tokenizer", other_tokenizer),
    "tokenizer settings": ("tokenizer", lambda p: edit(p / "tokenizer_config.json", lambda c: c.update(eos_token="a"))),
    "config": ("config", lambda p: edit(p / "config.json", lambda c: c.update(rms_norm_eps=1e-6))),
    "stop tokens": ("config", lambda p: edit(p / "generation_config.json", lambda c: c.update(eos_token_id=[2, 3]))),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_mismatches_are_refused(tiny_target: Target, copy: Path, planted: str) -> None:
    part, plant = PLANTED[planted]
    plant(copy)
    expected, actual = tiny_target.identity(), at(copy).identity()
    assert [k for k in expected if expected[k] != actual[k]] == [part]
    with pytest.raises(EagleError, match=f"^drafter x was made with a target whose {part} differs from this one's"):
        require_same(expected, actual, "drafter x")
    require_same(expected, tiny_target.identity(), "drafter x")


def test_require_same_names_every_part() -> None:
    with pytest.raises(EagleError, match="whose weights and template differ from"):
        require_same({"weights": 1, "config": 2, "template": 3}, {"weights": 0, "config": 2}, "x")
    with pytest.raises(EagleError, match="whose tokenizer differs from"):
        require_same({"weights": 1}, {"weights": 1, "tokenizer": 2}, "x")


def test_code_counts_if_it_is_trusted(copy: Path) -> None:
    def identity(trusted: bool) -> dict[str, Any]:
        return resolve(TargetConfig("t", str(copy), None, None, None, trusted, (1,))).identity()

    (copy / "modeling.py").write_text("x = 1")
    trusted, plain = identity(True), identity(False)
    (copy / "modeling.py").write_text("x = 2, and longer")
    assert identity(True)["config"] != trusted["config"]
    assert identity(False) == plain
