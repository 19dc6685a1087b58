"""The whole command, as a user runs it: processes, files, kills. A tiny random target makes it quick."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STAGES = ("prompts", "responses", "hidden_states", "drafter", "export", "benchmark")
SMALL = (
    "target=directory", "target.aux_layer_ids=[1,2,4]", "tracking=disabled", "data.limit_train=16", "data.limit_eval=8",
    "sampling.max_new_tokens=16", "sampling.eval_max_new_tokens=12", "drafter.draft_vocab_size=64", "train.epochs=2",
    "train.tokens_per_step=512", "train.validations=1", "benchmark.timing_prompts=2", "benchmark.timing_tokens=4",
    "benchmark.resamples=200",
)  # fmt: skip


@pytest.fixture
def workplace(tmp_path: Path, write_target: Callable[[Path, int], None]) -> Path:
    write_target(tmp_path / "tiny", 0)
    return tmp_path


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "eagle3x", *SMALL, "target.path=tiny", *args]


def run(workplace: Path, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*args), cwd=workplace, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr[-4000:]
    return done


def manifests(workplace: Path) -> dict[str, dict[str, Any]]:
    """By stage/key, every finished artifact's manifest."""
    files = (workplace / "outputs" / "artifacts").glob("*/*/manifest.json")
    return {f"{f.parts[-3]}/{f.parts[-2]}": json.loads(f.read_text()) for f in files if not f.parts[-2].startswith(".")}


def summary(workplace: Path, where: str = "outputs/latest") -> dict[str, Any]:
    return json.loads((workplace / where / "summary.json").read_text())


def kill_when_it_appears(workplace: Path, stage: str) -> None:
    """Start the job; SIGKILL its process group as soon as `stage` has begun."""
    process = subprocess.Popen(
        command(), cwd=workplace, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    folder = workplace / "outputs" / "artifacts" / stage
    deadline = time.monotonic() + 300
    while not (folder.is_dir() and any(folder.glob(".*partial*"))):
        if process.poll() is not None:
            assert any(m.startswith(stage) for m in manifests(workplace)), process.stderr and process.stderr.read()
            return  # the stage was done before this test could look
        assert time.monotonic() < deadline, f"{stage} never began"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_kill_in_any_stage_loses_nothing_that_was_finished(workplace: Path) -> None:
    finished: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        kill_when_it_appears(workplace, stage)
        now = manifests(workplace)
        for key, manifest in finished.items():
            assert now[key] == manifest, f"{key} was made again"
        finished = now
    run(workplace)
    now = manifests(workplace)
    assert {key.split("/")[0] for key in now} == set(STAGES)
    for key, manifest in finished.items():
        assert now[key] == manifest, f"{key} was made again"
    [cell] = summary(workplace)["cells"]
    assert cell["status"] == "ok"
    assert (workplace / "outputs/latest/report.html").is_file()
    assert (workplace / "outputs/latest/report.md").is_file()

    run(workplace)  # everything is there: nothing is made again
    assert manifests(workplace) == now
    assert all(stage["reused"] for stage in summary(workplace)["cells"][0]["stages"].values())


def test_a_matrix_shares_what_its_cells_have_in_common(workplace: Path) -> None:
    done = run(workplace, "-m", "capture=as_is,plus_one", "serve.capture=trained,as_is")
    made = manifests(workplace)
    count = {stage: sum(key.startswith(stage + "/") for key in made) for stage in STAGES}
    # as_is trained at [1,2,4], plus_one at [2,3,5]; raw ids are right for the first and one early for the second.
    assert count == {"prompts": 1, "responses": 1, "hidden_states": 2, "drafter": 2, "export": 4, "benchmark": 4}
    assert "reus" in done.stderr
    cells = {cell["name"]: cell for cell in summary(workplace, "multirun/latest")["cells"]}
    assert len(cells) == 4
    mismatched = {name: cell["mismatched"] for name, cell in cells.items()}
    assert {name for name, wrong in mismatched.items() if wrong} == {
        name for name in cells if "capture=plus_one" in name.split() and "serve.capture=as_is" in name.split()
    }
    for cell in cells.values():
        trained = [2, 3, 5] if "capture=plus_one" in cell["name"].split() else [1, 2, 4]
        assert cell["boundaries"]["trained"] == trained
        assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8


def test_a_failed_cell_is_reported_and_the_others_run(workplace: Path) -> None:
    # Boundary 0 cannot be one block early: that cell fails when it is served, the other does not.
    done = run(
        workplace, "-m", "serve.capture=as_is", "serve.aux_layer_ids=[1,2,4],[1,2,9]", code=1,
    )  # fmt: skip
    cells = summary(workplace, "multirun/latest")["cells"]
    assert sorted(cell["status"] for cell in cells) == ["failed", "ok"]
    assert "9" in next(cell["error"] for cell in cells if cell["status"] == "failed")
    assert "1 of 2 cells failed" in done.stderr


def test_a_diagnosis_that_cannot_be_served_climbs_the_other_rungs_and_says_so_first(workplace: Path) -> None:
    run(workplace, "stage=diagnose", "backend@serve.backend=vllm", "serve.backend.python=/nowhere/bin/python")
    assert summary(workplace)["headline"].startswith("Diagnosis: the drafter could not be served: serve: ")
    [cell] = summary(workplace)["cells"]
    assert cell["status"] == "ok"
    rungs = {rung["name"]: rung for rung in cell["diagnosis"]["rungs"]}
    assert [name for name, rung in rungs.items() if rung["tau"] is None] == ["responses", "states", "served"]
    assert "/nowhere/bin/python" in rungs["served"]["skipped"]
    assert "skipped" in (workplace / "outputs/latest/report.html").read_text()

    # Where it was tried and failed, that is no success; what was made before is reused.
    done = run(workplace, "stage=diagnose", "serve.capture=as_is", "serve.aux_layer_ids=[1,2,9]", code=1)
    said = summary(workplace)["headline"]
    assert said.startswith("Diagnosis: the drafter could not be served: this drafter cannot be served here: ")
    assert "[1, 2, 9]" in said
    assert "nothing is lost from the drafter as trained" in said
    assert said in done.stderr
    [cell] = summary(workplace)["cells"]
    assert cell["status"] == "failed"
    assert [step["rung"] for step in cell["diagnosis"]["steps"]] == ["exported"]
    assert "could not be served" in (workplace / "outputs/latest/report.html").read_text()


@pytest.mark.long
def test_a_planted_fault_is_named_and_leaves_other_artifacts_alone(workplace: Path) -> None:
    run(workplace)
    healthy = manifests(workplace)
    run(workplace, "stage=diagnose", "control=columns_swapped")
    made = {key.split("/")[0] for key in manifests(workplace).keys() - healthy.keys()}
    assert made == {"export", "benchmark", "diagnose"}  # the drafter was not trained again
    assert summary(workplace)["controls"][0]["planted"] == ["columns_swapped"]


def test_two_runs_at_once_make_everything_once(workplace: Path) -> None:
    both = [
        subprocess.Popen(command("stage=hidden_states"), cwd=workplace, stderr=subprocess.PIPE, text=True) for _ in "ab"
    ]
    for process in both:
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    assert sorted(key.split("/")[0] for key in manifests(workplace)) == ["hidden_states", "prompts", "responses"]


def test_stage_stops_where_it_was_asked_to(workplace: Path) -> None:
    run(workplace, "stage=responses")
    assert sorted(key.split("/")[0] for key in manifests(workplace)) == ["prompts", "responses"]


def test_other_weights_get_other_artifacts(workplace: Path, write_target: Callable[[Path, int], None]) -> None:
    run(workplace, "stage=responses")
    write_target(workplace / "tiny", 1)
    run(workplace, "stage=responses")
    made = manifests(workplace)
    assert sorted(key.split("/")[0] for key in made) == ["prompts", "responses", "responses"]

    # Another target's text, planted where this one's is looked for.
    store = workplace / "outputs" / "artifacts"
    first, second = sorted((k for k in made if k.startswith("responses")), key=lambda k: made[k]["started"])
    shutil.rmtree(store / second)
    shutil.copytree(store / first, store / second)
    refused = run(workplace, "stage=responses", code=1)
    assert "weights" in refused.stderr
    assert second.split("/")[1] in refused.stderr
