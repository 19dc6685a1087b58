"""SGLang's models, capturing, beside requests of which no states are wanted, and asked for what they cannot capture.

The offline engine's own tests (test_sglang_engine.py) capture through the adapter, which asks for neither.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3x.engines.captured import Assembly
from eagle3x.engines.inside.sglang_capture.order import PREFIX
from eagle3x.engines.inside.states_ring import RingReader, Step
from eagle3x.engines.interpreter import find
from eagle3x.engines.sglang_arguments import capture_environment
from eagle3x.targets import Target
from eagle3x.types import HiddenStates, TokenSample

pytestmark = pytest.mark.usefixtures("no_other_engine")

PROJECT = Path(__file__).parents[2]
CPU = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "prefill_attention_backend": "intel_amx",
    "decode_attention_backend": "intel_amx", "sampling_backend": "pytorch", "disable_cuda_graph": True,
    "grammar_backend": "none", "disable_radix_cache": True, "skip_tokenizer_init": True, "mem_fraction_static": 0.3,
    "max_total_tokens": 4096, "max_running_requests": 8, "context_length": 512,
}  # fmt: skip
LENGTHS = (5, 1, 37, 120, 64, 2, 300, 17)
FORWARDS = 40
"""More than a run of all texts has: they are read when it has ended."""
TOLERANCE = 2e-5
"""Relative error of a row, float32; the nearest wrong boundary is at 4e-1."""


@dataclass(frozen=True)
class Prefill:
    """What a run left: its exit code, the engine's log, and the states of its forwards."""

    exit_code: int
    log: str
    steps: list[Step]


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    return find("sglang", None, "cpu").python


def samples(vocabulary: int) -> list[TokenSample]:
    choose = random.Random(0)
    return [
        TokenSample(f"s{i}", tuple(choose.randrange(5, vocabulary) for _ in range(length)))
        for i, length in enumerate(LENGTHS)
    ]


def prefill(
    python: Path, target: Target, asked: Sequence[TokenSample], ids: Sequence[int], **arguments: Any
) -> Prefill:
    """Let SGLang read all samples at once, beside a request that decodes and of which nothing is wanted."""
    batch = [["unwanted", [7, 8, 9, 10], 24]] + [[f"{PREFIX}{i}", list(s.token_ids), 1] for i, s in enumerate(asked)]
    ring = RingReader(FORWARDS, CPU["max_total_tokens"] * 6 * target.hidden_size * 4)
    environment = {
        **capture_environment(ids, ring.path),
        "PYTHONPATH": str(PROJECT / "eagle3x" / "engines" / "inside"),
        "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # on cores that others use as well, two threads wait for each other
    }  # fmt: skip
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("sglang_prefill.py"))],
        input=json.dumps({"engine": {"model_path": str(target.path), **CPU, **arguments}, "batches": [batch]}),
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    steps = list(ring.steps())
    ring.close()
    return Prefill(done.returncode, done.stderr, steps)


def assert_equal_to_transformers(states: Sequence[HiddenStates], boundaries: Sequence[int], target: Target) -> None:
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    for found in states:
        with torch.no_grad():
            reference = model(torch.tensor([found.token_ids]), output_hidden_states=True).hidden_states
        expected = [reference[b][0] for b in boundaries] + [reference[-1][0]]
        for rows, wanted in zip([*found.aux.chunk(len(boundaries), dim=-1), found.last], expected, strict=True):
            assert ((rows - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < TOLERANCE


def test_chunked_prefill_beside_decoding(sglang_python: Path, tiny_target: Target) -> None:
    asked = samples(128)
    run = prefill(sglang_python, tiny_target, asked, range(5), chunked_prefill_size=32, enable_mixed_chunk=True)
    assert run.exit_code == 0, run.log
    pieces = [number for step in run.steps for number, *_ in step.rows]
    assert pieces.count(6) > 300 // 32
    # 32 less 1: the unwanted request wrote a token in that forward, and its row is nobody's.
    assert any(sum(length for *_, length in step.rows) == 31 for step in run.steps)
    assembly = Assembly(asked, "post_norm")
    states = list(assembly.completed(iter(run.steps)))
    assembly.require_all()
    assert len(states) == len(asked)
    assert_equal_to_transformers(states, range(1, 6), tiny_target)


def test_an_id_that_the_model_does_not_capture_ends_the_engine(sglang_python: Path, tiny_target: Target) -> None:
    run = prefill(sglang_python, tiny_target, samples(128), [1, 5])  # boundary 6 = after the last block
    assert run.exit_code != 0
    assert "captured at layer ids [1, 5], has states of shapes" in run.log
    assert run.steps == []
