"""The driver is asked, as a program that stands for it here answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3x.config import Hardware
from eagle3x.engines.gpus import compute_capability, gpu_memory_bytes


def cuda(*devices: int) -> Hardware:
    return Hardware(device="cuda", threads=None, devices=devices or None)


ANSWERS = """#!/bin/sh
case "$1 $2" in
    "--id=0 --query-gpu=compute_cap") echo 9.0;;
    "--id=1 --query-gpu=compute_cap") echo 8.9;;
    "--id=0 --query-gpu=memory.total") echo 143771;;
    *) exit 6;;
esac
"""


def test_the_driver_is_asked_for_the_gpu_that_is_to_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compute_capability(cuda()) is None  # no such tool
    assert gpu_memory_bytes(cuda()) == 0
    tool.write_text(ANSWERS)
    tool.chmod(0o755)
    assert compute_capability(cuda()) == "9.0"
    assert compute_capability(cuda(1)) == "8.9"
    assert compute_capability(cuda(2)) is None
    assert gpu_memory_bytes(cuda()) == 143771 * 1024**2
    assert gpu_memory_bytes(cuda(2)) == 0
    tool.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert compute_capability(cuda()) is None
