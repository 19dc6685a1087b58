"""The whole command with the real SGLang on a CPU: engines killed at work, what the next run resumes, and mixes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from whole_command import Workplace, finish, kill_engine, nothing_left

from eagle3x.engines.ports import taken

pytestmark = pytest.mark.usefixtures("no_other_engine")

SGLANG = ("backend=sglang", "backend.batch_size=2", "generate.backend.batch_size=2", "serve.backend.batch_size=2")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, write_target: Callable[..., None]) -> Iterator[Workplace]:
    """One store for all tests here."""
    folder = tmp_path_factory.mktemp("sglang")
    write_target(folder / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3X_CACHE", str(folder / "cache"))
        yield Workplace(folder)


@pytest.mark.long
def test_an_engine_killed_at_work_is_named_leaves_nothing_and_the_next_run_resumes(workplace: Workplace) -> None:
    """Its front while it writes, its scheduler while it captures, its server while it is measured."""
    job = workplace.start(*SGLANG)
    below = kill_engine(job, "sglang_worker.py", workplace.partial("responses", "parts/*.parquet"))
    said = finish(job, 1)
    assert "SIGKILL" in said
    assert "sglang-generate.log and ends:" in said
    nothing_left(below)
    assert workplace.made() == {"prompts"}

    job = workplace.start(*SGLANG)
    below = kill_engine(job, "sglang::scheduler", workplace.partial("hidden_states", "train"))
    said = finish(job, 1)
    assert re.search(r"responses: [1-9]\d* are there from an earlier attempt", said)
    assert "sglang-capture.log and ends:" in said
    nothing_left(below)
    assert workplace.made() == {"prompts", "responses"}

    job = workplace.start(*SGLANG)
    below = kill_engine(job, "sglang::scheduler", workplace.partial("benchmark", "acceptance.jsonl"))
    said = finish(job, 1)
    assert re.search(r"sglang-serve(-drafter)?\.log and ends:", said)
    nothing_left(below)
    ports = {int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", said)}
    assert ports
    assert not [port for port in ports if taken(port)]
    assert workplace.made() == {"prompts", "responses", "hidden_states", "drafter", "export"}

    said = workplace.run(*SGLANG)
    assert all(f"{stage}: reused" in said for stage in ("responses", "hidden_states", "drafter", "export"))
    assert "passed before" in said  # the known-answer pair, in the run before
    cell = workplace.cell()
    assert cell["status"] == "ok"
    assert cell["boundaries"]["predicted"] == [1, 2, 4]
    assert not cell["mismatched"]
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8
    assert cell["identical_outputs"]["rate"] == 1
    assert cell["speedup"]


def test_sglang_serves_what_transformers_wrote_and_raw_ids_are_called_mismatched(workplace: Workplace) -> None:
    """SGLang reads raw ids one boundary later; the drafter was trained on the ids themselves."""
    mix = ("backend@serve.backend=sglang", "serve.backend.batch_size=2", "serve.capture=as_is")
    said = workplace.run(*mix, "benchmark.timing=false")
    assert "SGLang 0.5.23 loaded" not in said  # no worker: transformers wrote and captured
    cell = workplace.cell()
    assert (cell["engine"]["engine"], cell["engine"]["version"]) == ("sglang", "0.5.23")
    assert cell["mismatched"]
    assert (cell["boundaries"]["trained"], cell["boundaries"]["predicted"]) == ([1, 2, 4], [2, 3, 5])
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8


@pytest.mark.long
def test_sglang_writes_the_text_only(workplace: Workplace) -> None:
    said = workplace.run("backend@generate.backend=sglang", "generate.backend.batch_size=2")
    assert "SGLang 0.5.23 loaded" in said or "responses: reused" in said  # the text of the first test here is the same
    assert "capture probe: matched, boundaries [1, 2, 4] and the post_norm" in said  # transformers' states
    cell = workplace.cell()
    assert cell["engine"]["engine"] == "transformers"
    assert cell["replay"]["identical_counters"] == cell["replay"]["requests"] == 8
