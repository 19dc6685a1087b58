"""`python -m eagle3x` in a folder of its own, on a target that is made in a second: run, killed at work, run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL = (
    "target=directory", "target.path=tiny", "target.aux_layer_ids=[1,2,4]", "tracking=disabled", "data.limit_train=16",
    "data.limit_eval=8", "sampling.max_new_tokens=48", "sampling.eval_max_new_tokens=12", "train.epochs=1",
    "drafter.draft_vocab_size=64", "train.tokens_per_step=512", "train.validations=1", "benchmark.timing_prompts=2",
    "benchmark.timing_tokens=4", "benchmark.resamples=200", "benchmark.acceptance_concurrency=1",
)  # fmt: skip
SECONDS = 400.0


@dataclass(frozen=True)
class Workplace:
    """A folder with the target `tiny` and one store for all runs there."""

    folder: Path

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "eagle3x", *SMALL, *overrides]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *overrides: str) -> str:
        return finish(self.start(*overrides), 0)

    def partial(self, stage: str, pattern: str) -> Callable[[], bool]:
        """Whether a stage that is at work has written such a file."""
        folder = self.folder / "outputs/artifacts" / stage
        return lambda: any(folder.glob(f".*partial*/{pattern}"))

    def made(self) -> set[str]:
        files = (self.folder / "outputs/artifacts").glob("*/*/manifest.json")
        return {f.parts[-3] for f in files if not f.parts[-2].startswith(".")}

    def cell(self) -> dict[str, Any]:
        return json.loads((self.folder / "outputs/latest/summary.json").read_text())["cells"][0]


def finish(process: subprocess.Popen[str], code: int) -> str:
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == code, said[-4000:]
    return said


def descendants(pid: int) -> list[int]:
    """Of a process, from /proc: children first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children = [int(word) for word in task.read_text().split()]
        found += [*children, *(grandchild for child in children for grandchild in descendants(child))]
    return found


def program(pid: int, word: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"-I" not in words and any(w.endswith(word.encode()) for w in words)  # the guard's own line names it too


def kill_engine(process: subprocess.Popen[str], word: str, moment: Callable[[], bool]) -> list[int]:
    """SIGKILL the engine process whose command line has `word`, at that moment; returns what ran below the command."""
    deadline = time.monotonic() + SECONDS
    while not moment():
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    below = descendants(process.pid)
    (victim, *_) = [pid for pid in below if program(pid, word)]
    os.kill(victim, signal.SIGKILL)
    return below


def nothing_left(below: list[int]) -> None:
    alive = [pid for pid in below if Path(f"/proc/{pid}").exists()]
    assert not alive, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive]
