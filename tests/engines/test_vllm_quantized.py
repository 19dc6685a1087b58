"""The real vLLM on a CPU with rounded targets: states and text against the floating-point reference of the same codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3x.config import Hardware
from eagle3x.diagnosis.probe import CaptureVerdict, judge
from eagle3x.diagnosis.reference import reference_states
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.quantization.in_slot import in_slot, reference_quantization
from eagle3x.targets import Target
from eagle3x.types import Request, TokenSample

pytestmark = pytest.mark.usefixtures("no_other_engine")

CPU = Hardware(device="cpu", threads=None, devices=None)
BOUNDARIES = (1, 3, 4)
SAMPLES = [
    TokenSample(f"text-{i}", tuple((7 * i + 31 * t) % 125 + 3 for t in range(n))) for i, n in enumerate((70, 41))
]
VLLM = Backend(
    name="vllm", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8, engine_args={},
    python=None, url=None, port=None, memory_fraction=0.85, start_timeout=600.0,
)  # fmt: skip


def slot(scheme: str, name: str = "vllm") -> Slot:
    backend = replace(VLLM, name=name)  # type: ignore[arg-type]
    return Slot("extract", backend, Quantization(scheme=scheme), Attention(name="auto"))  # type: ignore[arg-type]


def verdicts(scheme: str, target: Target, logs: Path) -> Iterator[tuple[CaptureVerdict, CaptureVerdict]]:
    """What vLLM captures, judged by the reference of the same codes and by the unquantized one."""
    rounded = in_slot(slot(scheme), target)
    by_id = {sample.id: sample for sample in SAMPLES}
    with adapter("vllm").open(slot(scheme), target, CPU, Job(80, logs)) as engine:
        for states in engine.capture(SAMPLES, BOUNDARIES):
            ids = by_id[states.id].token_ids
            yield tuple(
                judge(states.aux, states.last, states.last_norm, BOUNDARIES, reference_states(of, ids))
                for of in (rounded, target)
            )


def test_int8(tiny_target, tmp_path):
    for a, b in verdicts("int8", tiny_target, tmp_path):
        print(a.describe())
        print(b.describe())


def test_int4(tiny_target, tmp_path):
    for a, b in verdicts("int4", tiny_target, tmp_path):
        print(a.describe())
        print(b.describe())


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_text(scheme, tiny_target, tmp_path):
    requests = [
        Request(s.id, s.token_ids[: 12 + i], 24, ignore_eos=True, top2_gaps=True) for i in range(4) for s in SAMPLES[:1]
    ]
    requests = [replace(r, id=str(i), prompt_ids=r.prompt_ids[i:]) for i, r in enumerate(requests)]
    with adapter("vllm").open(slot(scheme), tiny_target, CPU, Job(80, tmp_path)) as engine:
        found = {c.id: c for c in engine.generate(requests)}
    with adapter("transformers").open(slot(scheme, "transformers"), tiny_target, CPU, Job(80, tmp_path)) as engine:
        expected = {c.id: c for c in engine.generate(requests)}
    for i in found:
        same = [a == b for a, b in zip(found[i].token_ids, expected[i].token_ids)]
        print(
            i,
            sum(same),
            same.index(False) if not all(same) else None,
            expected[i].top2_gaps[same.index(False)] if not all(same) else min(expected[i].top2_gaps),
        )
