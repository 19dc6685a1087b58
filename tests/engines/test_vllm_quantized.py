"""The real vLLM on a CPU with rounded targets: states and text against a float reference of the same codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3x.benchmark.cell import ROUNDED_NEAR_TIE
from eagle3x.config import Hardware, TargetConfig
from eagle3x.diagnosis.probe import judge
from eagle3x.diagnosis.reference import reference_states
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.quantization.in_slot import reference_target
from eagle3x.targets import Target, resolve
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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, write_target: Callable[..., None]) -> Target:
    """The tiny target with heads of 32, the smallest that vLLM has on a CPU."""
    path = tmp_path_factory.mktemp("targets") / "wide"
    write_target(path, head_dim=32)
    return resolve(
        TargetConfig(
            name="wide", path=str(path), wheel=None, hub_id=None, revision=None, trust_remote_code=False,
            aux_layer_ids=BOUNDARIES,
        )
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_states_are_those_of_the_codes(scheme: str, wide: Target, tmp_path: Path) -> None:
    """vLLM computes with the codes, the reference with what they stand for; the plain target is far from both."""
    if reasons := adapter("vllm").refusals(slot(scheme), wide, CPU):
        pytest.skip("; ".join(reasons))
    with adapter("vllm").open(slot(scheme), wide, CPU, Job(80, tmp_path)) as engine:
        captured = {states.id: states for states in engine.capture(SAMPLES, BOUNDARIES)}
    rounded = reference_target(slot(scheme), wide, CPU)
    for sample in SAMPLES:
        states = captured[sample.id]
        found = (states.aux, states.last, states.last_norm, BOUNDARIES)
        verdict = judge(*found, reference_states(rounded, sample.token_ids))
        plain = judge(*found, reference_states(wide, sample.token_ids))
        assert verdict.matched, verdict.describe()
        for ours, theirs in zip((*verdict.columns, verdict.last), (*plain.columns, plain.last), strict=True):
            assert ours.error < 1e-5 < 1e-2 < theirs.error, verdict.describe()


def test_text_is_that_of_the_codes(wide: Target, tmp_path: Path) -> None:
    """Up to near-ties: a token's keys may have been computed in another batch, from inputs rounded to another code."""
    prompt = SAMPLES[0].token_ids
    requests = [Request(f"{i}", prompt[i : 12 + i], 24, ignore_eos=True, top2_gaps=True) for i in range(6)]
    with adapter("vllm").open(slot("int8"), wide, CPU, Job(80, tmp_path)) as engine:
        text = {answer.id: answer for answer in engine.generate(requests)}
    with adapter("transformers").open(slot("int8", "transformers"), wide, CPU, Job(80, tmp_path)) as engine:
        expected = {answer.id: answer for answer in engine.generate(requests)}
    same = 0
    for id_, answer in text.items():
        gaps, pairs = expected[id_].top2_gaps, zip(answer.token_ids, expected[id_].token_ids, strict=True)
        assert gaps is not None
        parts_at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert parts_at is None or gaps[parts_at] < ROUNDED_NEAR_TIE, f"{id_} parts at token {parts_at}: no near-tie"
        same += len(gaps) if parts_at is None else parts_at
    assert same > 6 * 24 / 2
