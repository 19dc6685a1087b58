"""The real SGLang on a CPU, without a server: text, states at every boundary, and what happens when it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3x.config import Hardware
from eagle3x.diagnosis.probe import judge
from eagle3x.diagnosis.reference import reference_states
from eagle3x.engines import adapter
from eagle3x.engines.child import EngineDied
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.sglang import SglangEngine
from eagle3x.targets import Target
from eagle3x.types import EagleError, Request, TokenSample

pytestmark = pytest.mark.usefixtures("no_other_engine")

CPU = Hardware(device="cpu", threads=None, devices=None)
LONGEST = 160
LENGTHS = (150, 7, 33, 64, 20, 1, 90, 48)
CHUNK = 128
"""Tokens of one forward: the longest text is cut, short ones share one."""
PLAIN = (Quantization(scheme="none"), Attention(name="auto"))


def slot(role: str = "extract", **changes: Any) -> Slot:
    backend = Backend(
        name="sglang", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8,
        engine_args={"chunked_prefill_size": CHUNK, "max_prefill_tokens": CHUNK}, python=None, url=None, port=None,
        memory_fraction=0.85, start_timeout=600.0,
    )  # fmt: skip
    return Slot(role, replace(backend, **changes), *PLAIN)  # type: ignore[arg-type]


def open_engine(target: Target, logs: Path, **changes: Any) -> SglangEngine:
    opened = adapter("sglang").open(slot(**changes), target, CPU, Job(LONGEST, logs))
    assert isinstance(opened, SglangEngine)
    return opened


@pytest.fixture(scope="module")
def engine(smollm2: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    with open_engine(smollm2, tmp_path_factory.mktemp("logs")) as opened:
        yield opened


def texts(seed: int, vocabulary: int = 40000) -> list[TokenSample]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    return [TokenSample(f"text-{i}", tuple(row)) for i, row in enumerate(ids)]


def errors(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to its vector."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def assert_the_references(
    target: Target, samples: list[TokenSample], states: dict[str, Any], boundaries: list[int]
) -> None:
    for sample in samples:
        reference, found = reference_states(target, sample.token_ids), states[sample.id]
        assert (found.token_ids, found.last_norm) == (sample.token_ids, "post_norm")
        columns = found.aux.chunk(len(boundaries), dim=1)
        for b, column in zip(boundaries, columns, strict=True):
            assert errors(column, reference.of(b)) < 2e-5, f"{sample.id} boundary {b}"
        assert errors(found.last, reference.of(target.num_blocks, "final_normed")) < 2e-5


def test_every_boundary_of_every_sample_is_the_references(engine: SglangEngine, smollm2: Target) -> None:
    """Mixed lengths, in forwards that they share and that cut the longest: published faults mix up their states."""
    samples, boundaries = texts(0), list(range(1, smollm2.num_blocks))
    states = {s.id: s for s in engine.capture(samples, boundaries)}
    assert sorted(states) == sorted(s.id for s in samples)
    assert_the_references(smollm2, samples, states, boundaries)


def test_the_same_worker_captures_again(engine: SglangEngine, smollm2: Target) -> None:
    """And other boundaries start another, whose states are the same where both have them."""
    samples, boundaries = texts(0), (2, 14, 26)
    first = {s.id: s for s in engine.capture(samples[:3], boundaries)}
    worker = engine._offline
    more = {s.id: s for s in engine.capture(samples[3:] + samples[:1], boundaries)}
    assert engine._offline is worker
    torch.testing.assert_close(more["text-0"].aux, first["text-0"].aux, rtol=1e-4, atol=1e-4)
    assert_the_references(smollm2, samples, first | more, list(boundaries))
    reference = reference_states(smollm2, samples[0].token_ids)
    verdict = judge(first["text-0"].aux, first["text-0"].last, "post_norm", boundaries, reference)
    assert verdict.matched, verdict.describe()


def test_a_sample_that_is_too_long_is_refused_before_anything_runs(engine: SglangEngine) -> None:
    with pytest.raises(EagleError, match=f"161 tokens, should be 1 to {LONGEST}"):
        list(engine.capture([TokenSample("long", (5,) * (LONGEST + 1))], (2, 14, 26)))


def test_a_sample_of_the_longest_length_is_captured(engine: SglangEngine, smollm2: Target) -> None:
    (states,) = engine.capture([TokenSample("longest", tuple(range(100, 100 + LONGEST)))], (2, 14, 26))
    assert states.aux.shape == (LONGEST, 3 * smollm2.hidden_size)


QUESTIONS = ("What is 2+2?", "Say yes.", "Name the capital of France in one word.", "Say hello.")


def test_greedy_text_is_transformers_text(engine: SglangEngine, smollm2: Target) -> None:
    prompts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    requests = [
        Request(str(i), tuple(smollm2.tokenizer(p, add_special_tokens=False)["input_ids"]), 24, ignore_eos=i == 0)
        for i, p in enumerate(prompts)
    ]
    answers = {c.id: c for c in engine.generate(requests)}
    reference = Slot("generate", replace(slot().backend, name="transformers", engine_args={}), *PLAIN)
    with adapter("transformers").open(reference, smollm2, CPU, Job(LONGEST, Path())) as transformers:
        expected = {c.id: c for c in transformers.generate(requests)}
    for id_, answer in answers.items():
        assert (answer.token_ids, answer.finish) == (expected[id_].token_ids, expected[id_].finish)
    assert len(answers["0"].token_ids) == 24
    stopped = [a for a in answers.values() if a.finish == "stop"]
    assert stopped, "no answer stops within its limit: the stop token is not tested"
    assert all(a.token_ids[-1] in smollm2.eos_token_ids for a in stopped)


def test_text_comes_in_the_order_of_completion_and_at_full_length(engine: SglangEngine) -> None:
    """The longest answer that was promised room is not cut; shorter ones do not wait for it."""
    long = Request("long", tuple(range(100, 110)), LONGEST - 10, ignore_eos=True)
    short = [Request(f"short-{i}", tuple(range(200, 210 + i)), 3, ignore_eos=True) for i in range(20)]
    answers = list(engine.generate([long, *short]))
    assert answers[-1].id == "long"
    assert {a.id: len(a.token_ids) for a in answers} == {"long": LONGEST - 10, **{s.id: 3 for s in short}}
    assert {a.finish for a in answers} == {"length"}


def test_sampled_text_differs_from_greedy_text(engine: SglangEngine) -> None:
    asked = [Request(f"{i}", tuple(range(100, 140)), 16, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    texts = [c.token_ids for c in engine.generate([*asked, replace(asked[0], id="greedy", temperature=0.0)])]
    assert len(set(texts)) > 2


def test_two_tensor_parallel_ranks_capture_the_references_states(tiny_target: Target, tmp_path: Path) -> None:
    samples = texts(1, 128)
    with open_engine(tiny_target, tmp_path, tensor_parallel=2) as opened:
        states = {s.id: s for s in opened.capture(samples, (1, 2, 3, 4, 5))}
    assert_the_references(tiny_target, samples, states, [1, 2, 3, 4, 5])


def test_a_killed_engine_says_so_leaves_nothing_and_can_be_opened_again(tiny_target: Target, tmp_path: Path) -> None:
    """Its scheduler is killed while it captures: SGLang ends itself, and the states that had come are whole."""
    samples = [TokenSample(f"{i}-{s.id}", s.token_ids) for i in range(40) for s in texts(i, 128)]
    got = []
    with open_engine(
        tiny_target, tmp_path, engine_args={"chunked_prefill_size": 64, "max_prefill_tokens": 64}
    ) as opened:
        states = opened.capture(samples, (1, 2, 4))
        got += [next(states) for _ in range(4)]
        assert opened._offline is not None
        worker = opened._offline._worker
        (scheduler,) = [pid for pid in worker.processes() if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        below = worker.processes()
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"sglang-capture\.log and ends:"):
            got.extend(states)
    assert 4 <= len(got) < len(samples)
    assert all(torch.isfinite(states.aux).all() for states in got)
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
