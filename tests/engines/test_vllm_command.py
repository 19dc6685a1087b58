"""The whole command with the real vLLM on a CPU: engines killed at work, what the next run resumes, and mixes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3x.engines.scratch import SCRATCH, SHARED_MEMORY

pytestmark = pytest.mark.usefixtures("no_other_engine")

SMALL = (
    "target=directory", "target.path=tiny", "target.aux_layer_ids=[1,2,4]", "tracking=disabled", "data.limit_train=16",
    "data.limit_eval=8", "sampling.max_new_tokens=48", "sampling.eval_max_new_tokens=12", "train.epochs=1",
    "drafter.draft_vocab_size=64", "train.tokens_per_step=512", "train.validations=1", "benchmark.timing_prompts=2",
    "benchmark.timing_tokens=4", "benchmark.resamples=200", "benchmark.acceptance_concurrency=1",
)  # fmt: skip
VLLM = ("backend=vllm", "backend.batch_size=2", "generate.backend.batch_size=2", "serve.backend.batch_size=2")
SECONDS = 400.0


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, write_target: Callable[..., None]) -> Iterator[Path]:
    """One store for all tests here; heads of 32, the smallest that vLLM's CPU kernels take."""
    folder = tmp_path_factory.mktemp("vllm")
    write_target(folder / "tiny", 0, head_dim=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3X_CACHE", str(folder / "cache"))
        yield folder


def start(workplace: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eagle3x", *SMALL, *overrides]
    return subprocess.Popen(command, cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


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


def partial(workplace: Path, stage: str, pattern: str) -> Callable[[], bool]:
    folder = workplace / "outputs/artifacts" / stage
    return lambda: any(folder.glob(f".*partial*/{pattern}"))


def made(workplace: Path) -> set[str]:
    files = (workplace / "outputs/artifacts").glob("*/*/manifest.json")
    return {f.parts[-3] for f in files if not f.parts[-2].startswith(".")}


def summary(workplace: Path) -> dict[str, Any]:
    return json.loads((workplace / "outputs/latest/summary.json").read_text())["cells"][0]


def nothing_left(below: list[int], process: subprocess.Popen[str]) -> None:
    alive = [pid for pid in below if Path(f"/proc/{pid}").exists()]
    assert not alive, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive]
    assert not list(SHARED_MEMORY.glob(f"{SCRATCH}{process.pid}-*"))


def test_an_engine_killed_at_work_is_named_leaves_nothing_and_the_next_run_resumes(workplace: Path) -> None:
    job = start(workplace, *VLLM)
    below = kill_engine(job, "vllm_worker.py", partial(workplace, "responses", "parts/*.parquet"))
    said = finish(job, 1)
    assert "SIGKILL" in said
    assert "vllm-generate.log and ends:" in said
    nothing_left(below, job)
    assert made(workplace) == {"prompts"}

    job = start(workplace, *VLLM)
    below = kill_engine(job, "vllm_worker.py", lambda: any(SHARED_MEMORY.glob(f"{SCRATCH}{job.pid}-*/*")))
    said = finish(job, 1)
    assert re.search(r"responses: [1-9]\d* of \d+ are there from an earlier attempt", said)
    assert "vllm-capture.log" in said
    nothing_left(below, job)
    assert made(workplace) == {"prompts", "responses"}

    job = start(workplace, *VLLM)
    acceptance = partial(workplace, "benchmark", "acceptance.jsonl")
    below = kill_engine(job, "vllm.entrypoints.openai.api_server", acceptance)
    said = finish(job, 1)
    assert "vllm-serve-drafter.log" in said
    nothing_left(below, job)
    port = re.search(r"http://127\.0\.0\.1:(\d+)", said)
    assert port is not None
    assert made(workplace) == {"prompts", "responses", "hidden_states", "drafter", "export"}

    said = finish(start(workplace, *VLLM), 0)
    assert all(f"{stage}: reused" in said for stage in ("responses", "hidden_states", "drafter", "export"))
    assert "passed before" in said  # the known-answer pair, in the run before
    cell = summary(workplace)
    assert cell["status"] == "ok"
    assert cell["boundaries"]["predicted"] == [1, 2, 4]
    assert not cell["mismatched"]
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8
    assert cell["identical_outputs"]["rate"] == 1
    assert cell["speedup"]


def test_vllm_serves_what_transformers_wrote_and_ids_written_by_hand_are_called_mismatched(workplace: Path) -> None:
    """Raw ids plus one, as people write them for an engine that counts otherwise."""
    mix = ("backend@serve.backend=vllm", "serve.backend.batch_size=2", "serve.capture=plus_one")
    said = finish(start(workplace, *mix, "benchmark.timing=false"), 0)
    assert "vLLM loaded" not in said  # no worker: transformers wrote and captured
    cell = summary(workplace)
    assert (cell["engine"]["engine"], cell["engine"]["version"]) == ("vllm", "0.32.0")
    assert cell["mismatched"]
    assert (cell["boundaries"]["trained"], cell["boundaries"]["predicted"]) == ([1, 2, 4], [2, 3, 5])
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8


def test_vllm_writes_the_text_only(workplace: Path) -> None:
    said = finish(start(workplace, "backend@generate.backend=vllm", "generate.backend.batch_size=2"), 0)
    assert "vLLM loaded" in said or "responses: reused" in said  # the text of the first test here is the same
    assert "capture probe: matched, boundaries [1, 2, 4] and the post_norm" in said  # transformers' states
    cell = summary(workplace)
    assert cell["engine"]["engine"] == "transformers"
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8
