"""The whole command with the real vLLM on a CPU: engines killed at work, what the next run resumes, and mixes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from whole_command import Workplace, finish, kill_engine, nothing_left

pytestmark = pytest.mark.usefixtures("no_other_engine")

VLLM = ("backend=vllm", "backend.batch_size=2", "generate.backend.batch_size=2", "serve.backend.batch_size=2")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, write_target: Callable[..., None]) -> Iterator[Workplace]:
    """One store for all tests here; heads of 32, the smallest that vLLM's CPU kernels take."""
    folder = tmp_path_factory.mktemp("vllm")
    write_target(folder / "tiny", 0, head_dim=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3X_CACHE", str(folder / "cache"))
        yield Workplace(folder)


@pytest.mark.long
def test_an_engine_killed_at_work_is_named_leaves_nothing_and_the_next_run_resumes(workplace: Workplace) -> None:
    job = workplace.start(*VLLM)
    below = kill_engine(job, "vllm_worker.py", workplace.partial("responses", "parts/*.parquet"))
    said = finish(job, 1)
    assert "SIGKILL" in said
    assert "vllm-generate.log and ends:" in said
    nothing_left(below)
    assert workplace.made() == {"prompts"}

    job = workplace.start(*VLLM)
    below = kill_engine(job, "vllm_worker.py", workplace.partial("hidden_states", "train"))
    said = finish(job, 1)
    assert re.search(r"responses: [1-9]\d* are there from an earlier attempt", said)
    assert "vllm-capture.log" in said
    nothing_left(below)
    assert workplace.made() == {"prompts", "responses"}

    job = workplace.start(*VLLM)
    acceptance = workplace.partial("benchmark", "acceptance.jsonl")
    below = kill_engine(job, "vllm.entrypoints.openai.api_server", acceptance)
    said = finish(job, 1)
    assert "vllm-serve-drafter.log" in said
    nothing_left(below)
    port = re.search(r"http://127\.0\.0\.1:(\d+)", said)
    assert port is not None
    assert workplace.made() == {"prompts", "responses", "hidden_states", "drafter", "export"}

    said = workplace.run(*VLLM)
    assert all(f"{stage}: reused" in said for stage in ("responses", "hidden_states", "drafter", "export"))
    assert "passed before" in said  # the known-answer pair, in the run before
    cell = workplace.cell()
    assert cell["status"] == "ok"
    assert cell["boundaries"]["predicted"] == [1, 2, 4]
    assert not cell["mismatched"]
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8
    assert cell["identical_outputs"]["rate"] == 1
    assert cell["speedup"]


def test_vllm_serves_what_transformers_wrote_and_ids_written_by_hand_are_called_mismatched(
    workplace: Workplace,
) -> None:
    """Raw ids plus one, as people write them for an engine that counts otherwise."""
    mix = ("backend@serve.backend=vllm", "serve.backend.batch_size=2", "serve.capture=plus_one")
    said = workplace.run(*mix, "benchmark.timing=false")
    assert "vLLM 0.32.0 loaded" not in said  # no worker: transformers wrote and captured
    cell = workplace.cell()
    assert (cell["engine"]["engine"], cell["engine"]["version"]) == ("vllm", "0.32.0")
    assert cell["mismatched"]
    assert (cell["boundaries"]["trained"], cell["boundaries"]["predicted"]) == ([1, 2, 4], [2, 3, 5])
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8


@pytest.mark.long
def test_vllm_writes_the_text_only(workplace: Workplace) -> None:
    said = workplace.run("backend@generate.backend=vllm", "generate.backend.batch_size=2")
    assert "vLLM 0.32.0 loaded" in said or "responses: reused" in said  # the text of the first test here is the same
    assert "capture probe: matched, boundaries [1, 2, 4] and the post_norm" in said  # transformers' states
    cell = workplace.cell()
    assert cell["engine"]["engine"] == "transformers"
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8
