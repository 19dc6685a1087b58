"""The operators are there before torchvision's own code runs, and cost nothing until then. In a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STANDINS = Path(__file__).parent
TORCHVISION = """
import torch

@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold): ...

@torch.library.register_fake("torchvision::qnms")
def qnms(dets, scores, iou_threshold): ...
"""
"""What torchvision does when it is imported, and fails at where its library did not load."""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "torchvision.py").write_text(TORCHVISION)
    paths = os.pathsep.join([str(STANDINS), str(folder)])
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_the_pth_file_runs_lets_torchvision_be_imported(tmp_path: Path) -> None:
    line = (STANDINS / "torchvision_operators.pth").read_text()
    done = run(f"{line}\nimport sys; assert 'torch' not in sys.modules\nimport torchvision", tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_it_the_import_fails(tmp_path: Path) -> None:
    done = run("import torchvision", tmp_path)
    assert done.returncode != 0
    assert "nms" in done.stderr
