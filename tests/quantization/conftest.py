"""Targets whose config says that they are quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3x.targets import Target


@pytest.fixture
def quantized_copy(tiny_target: Target) -> Callable[[Path, dict[str, Any]], Target]:
    """A copy of the tiny target in a folder, whose config.json has such a `quantization_config`."""

    def copy(folder: Path, described: dict[str, Any]) -> Target:
        directory = folder / "quantized"
        shutil.copytree(tiny_target.path, directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
        return replace(tiny_target, path=directory)

    return copy
