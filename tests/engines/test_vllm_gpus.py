"""The real vLLM on GPUs: what needs one, and what needs two. Skipped on machines that have not that many.

pytest -n 0 tests/engines/test_vllm_gpus.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3x.config import Hardware, TargetConfig
from eagle3x.diagnosis.reference import reference_states
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.targets import Target, resolve
from eagle3x.types import HiddenStates, TokenSample

GPU = Hardware(device="cuda", threads=None, devices=None)
BOUNDARIES = (2, 4, 6)
LENGTHS = (500, 1, 37, 256, 90, 333)
DRIFT = 2.0
"""How much further from the float32 reference states may be than those of one GPU."""


def gpus(count: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, this machine has {found}")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, write_target: Callable[..., None]) -> Target:
    """Random, 8 blocks, 8 heads (4 KV) of 64: divisible by two ranks, of a size that every attention kernel has."""
    path = tmp_path_factory.mktemp("targets") / "random"
    write_target(path)  # its tokenizer
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, initializer_range=0.05,
            rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        )
    ).to(torch.bfloat16).save_pretrained(path)  # fmt: skip
    return resolve(
        TargetConfig(
            name="random", path=str(path), wheel=None, hub_id=None, revision=None, trust_remote_code=False,
            aux_layer_ids=BOUNDARIES,
        )
    )  # fmt: skip


def texts() -> list[TokenSample]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in LENGTHS]
    return [TokenSample(f"text-{i}", tuple(ids)) for i, ids in enumerate(drawn)]


def capture(target: Target, logs: Path, attention: str = "auto", **changes: object) -> dict[str, HiddenStates]:
    backend = Backend(
        name="vllm", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8,
        engine_args={"enforce_eager": True, "max_num_batched_tokens": 1024}, python=None, url=None, port=None,
        memory_fraction=0.3, start_timeout=600.0,
    )  # fmt: skip
    slot = Slot("extract", replace(backend, **changes), Quantization(scheme="none"), Attention(name=attention))  # type: ignore[arg-type]
    with adapter("vllm").open(slot, target, GPU, Job(max(LENGTHS), logs)) as engine:
        return {states.id: states for states in engine.capture(texts(), BOUNDARIES)}


def errors(states: dict[str, HiddenStates], target: Target) -> torch.Tensor:
    """[A+1]: relative error of each column over all tokens, against the reference."""
    off, size = torch.zeros(len(BOUNDARIES) + 1), torch.zeros(len(BOUNDARIES) + 1)
    for sample in texts():
        reference = reference_states(target, sample.token_ids)
        expected = torch.stack([*(reference.of(b) for b in BOUNDARIES), reference.of(target.num_blocks)], dim=1)
        found = states[sample.id]
        columns = torch.cat([found.aux, found.last], dim=1).float().view(len(sample.token_ids), -1, target.hidden_size)
        off += (columns - expected).square().sum(dim=(0, 2))
        size += expected.square().sum(dim=(0, 2))
    return (off / size).sqrt()


@pytest.fixture(scope="module")
def one_gpu(target: Target, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    found = errors(capture(target, tmp_path_factory.mktemp("logs")), target)
    assert float(found.max()) < 0.03, found
    return found


@gpus(1)
@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_states_of_other_attention_backends_are_the_references(
    target: Target, one_gpu: torch.Tensor, attention: str, tmp_path: Path
) -> None:
    found = errors(capture(target, tmp_path, attention), target)
    print(attention, found.tolist())
    assert (found < DRIFT * one_gpu).all(), (found, one_gpu)


@gpus(2)
def test_two_ranks_capture_what_one_does(target: Target, one_gpu: torch.Tensor, tmp_path: Path) -> None:
    found = errors(capture(target, tmp_path, tensor_parallel=2), target)
    print("two ranks", found.tolist(), "one", one_gpu.tolist())
    assert (found < DRIFT * one_gpu).all(), (found, one_gpu)
