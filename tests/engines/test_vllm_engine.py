"""The real vLLM on a CPU, without a server: text, states at every boundary, and what happens when it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3x.config import Hardware
from eagle3x.diagnosis.probe import judge
from eagle3x.diagnosis.reference import reference_states
from eagle3x.engines import adapter
from eagle3x.engines.child import EngineDied
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.vllm import VllmEngine
from eagle3x.targets import Target
from eagle3x.types import EagleError, Request, TokenSample

pytestmark = pytest.mark.usefixtures("no_other_engine")

CPU = Hardware(device="cpu", threads=None, devices=None)
LONGEST = 160
LENGTHS = (150, 7, 33, 64, 20, 1, 90, 48)


def slot(role: str = "extract", **changes: object) -> Slot:
    backend = Backend(
        name="vllm", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8,
        engine_args={"max_num_batched_tokens": 256}, python=None, url=None, port=None, memory_fraction=0.85,
        start_timeout=600.0,
    )  # fmt: skip
    return Slot(role, replace(backend, **changes), Quantization(scheme="none"), Attention(name="auto"))  # type: ignore[arg-type]


def open_engine(target: Target, logs: Path, **changes: object) -> VllmEngine:
    opened = adapter("vllm").open(slot(**changes), target, CPU, Job(LONGEST, logs))
    assert isinstance(opened, VllmEngine)
    return opened


@pytest.fixture(scope="module")
def engine(smollm2: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with open_engine(smollm2, tmp_path_factory.mktemp("logs")) as opened:
        yield opened


def texts(seed: int) -> list[TokenSample]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(100, 40000, (n,), generator=generator).tolist() for n in LENGTHS]
    return [TokenSample(f"text-{i}", tuple(row)) for i, row in enumerate(ids)]


@pytest.fixture(scope="module")
def captured(engine: VllmEngine, smollm2: Target) -> tuple[list[TokenSample], dict[str, torch.Tensor], list[str]]:
    """Every boundary of the target, of texts of mixed lengths that share engine steps."""
    samples, boundaries = texts(0), tuple(range(smollm2.num_blocks + 1))
    states = list(engine.capture(samples, boundaries))
    assert sorted(s.id for s in states) == sorted(s.id for s in samples)
    by_sample = {s.id: s.token_ids for s in samples}
    assert all(s.token_ids == by_sample[s.id] and s.last_norm == "pre_norm" for s in states)
    whole = {s.id: torch.cat([s.aux, s.last], dim=1).reshape(len(s.token_ids), -1, smollm2.hidden_size) for s in states}
    return samples, whole, [s.id for s in states]


def test_every_boundary_of_every_sample_is_the_references(captured: tuple, smollm2: Target) -> None:
    """Batches of mixed length: a published fault mixes up their states."""
    samples, states, _ = captured
    for sample in samples:
        reference = reference_states(smollm2, sample.token_ids)
        found_TBH = states[sample.id]
        assert found_TBH.shape[1] == smollm2.num_blocks + 2
        for b in range(smollm2.num_blocks + 1):
            expected = reference.of(b)
            error = (found_TBH[:, b] - expected).norm(dim=1) / expected.norm(dim=1)
            assert float(error.max()) < 1e-4, f"{sample.id} boundary {b}"
        torch.testing.assert_close(found_TBH[:, -1], found_TBH[:, smollm2.num_blocks])  # last: before the final norm


def test_samples_shared_an_engine_step(captured: tuple) -> None:
    """Else the test above says nothing of mixed batches: 413 tokens fit into two steps of 256, but not into one."""
    samples, _, order = captured
    first_step = [s.id for s in samples if s.id in order[:3]]
    assert len(first_step) >= 2


def test_the_same_worker_captures_again_and_other_boundaries_start_another(
    engine: VllmEngine, captured: tuple, smollm2: Target
) -> None:
    samples, states, _ = captured
    boundaries = (2, 14, 26)
    again = {s.id: s for s in engine.capture(samples[:3], boundaries)}
    worker = engine._offline
    more = {s.id: s for s in engine.capture(samples[3:], boundaries)}
    assert engine._offline is worker
    for id_, found in (again | more).items():
        whole = states[id_]
        torch.testing.assert_close(found.aux, whole[:, list(boundaries)].flatten(1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.last, whole[:, -1], rtol=1e-4, atol=1e-3)
    verdict = judge(
        again["text-0"].aux,
        again["text-0"].last,
        "pre_norm",
        boundaries,
        reference_states(smollm2, samples[0].token_ids),
    )
    assert verdict.matched, verdict.describe()


def test_a_sample_that_is_too_long_is_refused_before_anything_runs(engine: VllmEngine) -> None:
    with pytest.raises(EagleError, match=f"161 tokens, should be 1 to {LONGEST}"):
        list(engine.capture([TokenSample("long", (5,) * (LONGEST + 1))], (2, 14, 26)))


def test_a_killed_engine_says_so_leaves_nothing_and_can_be_opened_again(smollm2: Target, tmp_path: Path) -> None:
    """Killed while it captures; the states that had come are whole, and the log's end is in the message."""
    samples = [TokenSample(f"{i}-{s.id}", s.token_ids) for i in range(8) for s in texts(i)]
    got = []
    with open_engine(smollm2, tmp_path) as opened:
        states = opened.capture(samples, (2, 14, 26))
        got += [next(states) for _ in range(4)]
        assert opened._offline is not None
        pid = opened._offline._worker.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"SIGKILL[\s\S]*vllm-capture\.log"):
            got.extend(states)
    assert 4 <= len(got) < len(samples)
    assert all(torch.isfinite(states.aux).all() for states in got)
    assert not Path(f"/proc/{pid}").exists()


def test_greedy_text_is_transformers_text(engine: VllmEngine, smollm2: Target) -> None:
    prompts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    requests = [
        Request(str(i), tuple(smollm2.tokenizer(p, add_special_tokens=False)["input_ids"]), 24, ignore_eos=i == 0)
        for i, p in enumerate(prompts)
    ]
    answers = {c.id: c for c in engine.generate(requests)}
    reference = Slot("generate", replace(slot().backend, name="transformers", engine_args={}), *slot_rest())
    with adapter("transformers").open(reference, smollm2, CPU, Job(LONGEST, Path())) as transformers:
        expected = {c.id: c for c in transformers.generate(requests)}
    for id_, answer in answers.items():
        assert (answer.token_ids, answer.finish) == (expected[id_].token_ids, expected[id_].finish)
    assert len(answers["0"].token_ids) == 24
    stopped = [a for a in answers.values() if a.finish == "stop"]
    assert stopped, "no answer stops within its limit: the stop token is not tested"
    assert all(a.token_ids[-1] in smollm2.eos_token_ids for a in stopped)


QUESTIONS = ("What is 2+2?", "Say yes.", "Name the capital of France in one word.", "Say hello.")


def slot_rest() -> tuple[Quantization, Attention]:
    return Quantization(scheme="none"), Attention(name="auto")


def test_sampled_text_depends_on_the_requests_own_seed(engine: VllmEngine) -> None:
    def sampled(id_: str, seed: int) -> Request:
        return Request(id_, tuple(range(100, 140)), 16, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True)

    asked = [sampled("a", 1), sampled("b", 1), sampled("c", 2)]
    answers = {c.id: c.token_ids for c in engine.generate(asked)}
    assert answers["a"] == answers["b"] != answers["c"]
    assert {len(a) for a in answers.values()} == {16}
