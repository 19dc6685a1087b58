"""Which of SGLang's model files a target needs: to import the other two hundred is most of a start on a CPU.

SGLang imports each file of `sglang/srt/models` to see which classes it has, but for those that its environment variable
SGLANG_DISABLED_MODEL_ARCHS names (models/registry.py: import_model_classes). So the files that do not define the
target's class, nor a drafter's, are named there; what a needed file imports itself still comes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
DRAFTER_CLASS = "LlamaForCausalLMEagle3"


def only_models(python: Path, model_class: str) -> dict[str, str]:
    """The environment variable that keeps the SGLang of `python` from importing what `model_class` does not need.

    Empty where that cannot be told (an SGLang that lies elsewhere, a class that no file defines): it imports all then.
    """
    for folder in python.parent.parent.glob("lib/python3*/site-packages/sglang/srt/models"):
        classes = _classes(folder)
        needed = {name for name, found in classes.items() if found & {model_class, DRAFTER_CLASS}}
        if any(model_class in classes[name] for name in needed):
            return {VARIABLE: ",".join(sorted(classes.keys() - needed))}
    return {}


@cache
def _classes(folder: Path) -> dict[str, frozenset[str]]:
    """Names of the classes that each file defines."""
    return {file.stem: _defined(file.read_text(encoding="utf-8")) for file in _files(folder)}


def _files(folder: Path) -> Sequence[Path]:
    return sorted(file for file in folder.glob("*.py") if file.stem != "__init__")


def _defined(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"^class (\w+)", text, re.MULTILINE))
