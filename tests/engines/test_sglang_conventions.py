"""How SGLang's model classes number their layers, by content: the real SGLang on a CPU against transformers.

One engine is started for each class. Llama is in test_sglang_engine.py; docs/capture.md says which classes are known
from their source alone, and why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import target_classes
import torch

from eagle3x.config import Hardware
from eagle3x.diagnosis.reference import reference_states
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.sglang import SglangEngine
from eagle3x.targets import Target
from eagle3x.types import HiddenStates, TokenSample

pytestmark = pytest.mark.usefixtures("no_other_engine")

CPU = Hardware(device="cpu", threads=None, devices=None)
CHUNK = 64
LENGTHS = (100, 5, 17, 1, 40)
"""The first is cut into chunks, the others share a forward."""
TOLERANCE = 1e-4
FAR = 0.1
"""What a wrong boundary is off by, at least."""
NUMBERED = {
    "Qwen2ForCausalLM": {(1, 2, 3, 4, 5): [0, 1, 2, 3, 4]},
    "Qwen3ForCausalLM": {(1, 2, 3, 4, 5): [0, 1, 2, 3, 4]},
    "Qwen3MoeForCausalLM": {(1, 2, 3, 4, 5): [0, 1, 2, 3, 4]},
    "DeepseekV3ForCausalLM": {(2, 3, 4, 5): [1, 2, 3, 4], (3, 4, 5): [3, 4, 5]},
    "GptOssForCausalLM": {(1, 2, 3, 4, 5): [0, 1, 2, 3, 4], (2, 4, 6): [1, 3, 5]},
}
"""Class -> boundaries -> the ids that mean them. The last block's output (6) is what gpt_oss alone can capture."""


def samples() -> list[TokenSample]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 128, (n,), generator=generator).tolist() for n in LENGTHS]
    return [TokenSample(f"text-{i}", tuple(row)) for i, row in enumerate(ids)]


def open_engine(target: Target, logs: Path) -> SglangEngine:
    backend = Backend(
        name="sglang", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8,
        engine_args={"chunked_prefill_size": CHUNK, "max_prefill_tokens": CHUNK}, python=None, url=None, port=None,
        memory_fraction=0.85, start_timeout=600.0,
    )  # fmt: skip
    slot = Slot("extract", backend, Quantization(scheme="none"), Attention(name="auto"))
    opened = adapter("sglang").open(slot, target, CPU, Job(max(LENGTHS), logs))
    assert isinstance(opened, SglangEngine)
    return opened


def rows(states: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of each token: the difference, relative to its vector."""
    return (states - other).norm(dim=1) / other.norm(dim=1)


# Two starts each: the one rule that depends on the ids is always looked at.
@pytest.fixture(
    params=[pytest.param(name, marks=() if name == "DeepseekV3ForCausalLM" else pytest.mark.long) for name in NUMBERED]
)
def target(request: Any, tiny_target: Target, tmp_path: Path) -> Target:
    return target_classes.write(request.param, tmp_path / "target", tiny_target)


def test_ids_mean_the_boundaries_that_their_class_is_known_for(target: Target, tmp_path: Path) -> None:
    n = target.num_blocks
    with open_engine(target, tmp_path / "logs") as engine:
        for boundaries, ids in NUMBERED[target.model_class].items():
            assert engine.native_layer_ids(boundaries) == ids
            captured: dict[str, HiddenStates] = {s.id: s for s in engine.capture(samples(), boundaries)}
            assert len(captured) == len(LENGTHS)
            for sample in samples():
                reference, found = reference_states(target, sample.token_ids), captured[sample.id]
                for b, column in zip(boundaries, found.aux.chunk(len(boundaries), dim=1), strict=True):
                    assert float(rows(column, reference.of(b)).max()) < TOLERANCE, f"{sample.id} boundary {b}"
                    others = [reference.of(other) for other in range(n + 1) if other != b]
                    assert min(float(rows(column, other).min()) for other in others) > FAR
                assert float(rows(found.last, reference.of(n, "final_normed")).max()) < TOLERANCE
