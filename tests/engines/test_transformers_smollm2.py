"""The transformers engine on the real model: speculation changes no output, and replay counts as the engine does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3x.benchmark.config import Speculation
from eagle3x.config import Hardware
from eagle3x.diagnosis.replay import ReplaySample, replay
from eagle3x.drafters.checkpoint import load
from eagle3x.engines import adapter
from eagle3x.engines.base import Engine
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.targets import Target
from eagle3x.types import Request, TokenSample, total

JOB = Job(longest=512, logs=Path("logs"))

BOUNDARIES = (2, 14, 26)
TOKENS = 24
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that adds two numbers.",
    "Hi!",
    "Name three colours of the rainbow, and say for each of them one thing in nature that has this colour.",
)


@pytest.fixture(scope="module")
def engine(smollm2: Target) -> Iterator[Engine]:
    backend = Backend(
        name="transformers", runner="auto",
        dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8, engine_args={},
        python=None, url=None, port=None, memory_fraction=0.85, start_timeout=60.0,
    )  # fmt: skip
    slot = Slot("serve", backend, Quantization("none"), Attention("auto"))
    with adapter("transformers").open(slot, smollm2, Hardware(device="cpu", threads=None, devices=None), JOB) as opened:
        yield opened


@pytest.mark.slow
def test_lossless_and_counted_as_replay_does(smollm2: Target, engine: Engine, fit_drafter: Any, tmp_path: Path) -> None:
    prompts = {
        f"q{i}": tuple(
            smollm2.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for i, question in enumerate(QUESTIONS)
    }
    requests = [Request(i, ids, TOKENS) for i, ids in prompts.items()]
    # Greedy text that goes on past the stop: what replay walks, and what plain decoding must give up to there.
    longer = [Request(i, ids, TOKENS + 4, ignore_eos=True) for i, ids in prompts.items()]
    text = {c.id: c for c in engine.generate(longer)}
    samples = [TokenSample(i, ids + text[i].token_ids) for i, ids in prompts.items()]
    states = {s.id: s for s in engine.capture(samples, BOUNDARIES)}
    vocab = torch.tensor(sorted({token for c in text.values() for token in c.token_ids[::2]}))
    directory = fit_drafter(smollm2, [states["q0"], states["q1"]], BOUNDARIES, vocab, 25, tmp_path / "drafter")

    plain = {c.id: c for c in engine.serve(None, None).complete(requests, 4)}
    with engine.serve(directory, Speculation.chain(3)) as endpoint:
        served = {c.id: c for c in endpoint.complete(requests, 3)}
        totals = endpoint.totals()

    for i, completion in served.items():
        assert completion.top2_gaps is not None
        assert min(completion.top2_gaps) > 1e-3, "these prompts have no near tie: choose others"
        assert completion.token_ids == plain[i].token_ids == text[i].token_ids[: len(completion.token_ids)]
        assert completion.finish == plain[i].finish
    counters = [served[i].counters for i in prompts]
    assert totals == total([c for c in counters if c is not None])
    assert 0 < totals.accepted_at[0] < totals.verify_steps
    replayed = replay(
        load(directory, smollm2),
        [
            ReplaySample(i, torch.tensor(s.token_ids), s.aux, len(prompts[i]), len(served[i].token_ids))
            for i, s in ((i, states[i]) for i in prompts)
        ],
        3,
    )
    assert replayed == counters
