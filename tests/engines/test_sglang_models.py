"""Which of SGLang's model files are not imported for a target: never one that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3x.engines import interpreter
from eagle3x.engines.sglang_models import VARIABLE, only_models

FILES = {
    "llama": "class LlamaForCausalLM:\n    pass\nclass PhiForCausalLM(LlamaForCausalLM):\n    pass\n",
    "llama_eagle3": "from .llama import LlamaForCausalLM\nclass LlamaForCausalLMEagle3(LlamaForCausalLM):\n    pass\n",
    "qwen3": "# unlike LlamaForCausalLM\nclass Qwen3ForCausalLM:\n    pass\n",
    "registry": "def import_model_classes(): ...\n",
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment with an SGLang of four model files."""
    folder = tmp_path / "lib/python3.11/site-packages/sglang/srt/models"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    return tmp_path / "bin/python"


@pytest.mark.parametrize(
    ("model_class", "left_out"),
    [
        ("LlamaForCausalLM", "qwen3,registry"),
        ("PhiForCausalLM", "qwen3,registry"),
        ("Qwen3ForCausalLM", "llama,registry"),
    ],
)
def test_all_but_the_targets_and_the_drafters_file_are_left_out(python: Path, model_class: str, left_out: str) -> None:
    assert only_models(python, model_class) == {VARIABLE: left_out}


def test_a_class_that_no_file_defines_leaves_nothing_out(python: Path) -> None:
    assert only_models(python, "NewForCausalLM") == {}
    assert only_models(Path("/nowhere/bin/python"), "LlamaForCausalLM") == {}


@pytest.mark.parametrize(
    ("model_class", "file"),
    [
        ("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"), ("DeepseekV3ForCausalLM", "deepseek_v2"),
        ("GptOssForCausalLM", "gpt_oss"),
    ],
)  # fmt: skip
def test_the_installed_sglang_keeps_what_a_class_needs(model_class: str, file: str) -> None:
    found = interpreter.find("sglang", None, "cpu")
    left_out = only_models(found.python, model_class)[VARIABLE].split(",")
    assert len(left_out) > 100
    assert not {file, "llama_eagle3"} & set(left_out)
