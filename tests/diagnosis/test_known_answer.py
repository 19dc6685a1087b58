"""The tagged known-answer pair, proved on the transformers engine and by replay."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3x.benchmark.config import Speculation
from eagle3x.capture import CaptureError, Reader, predicted_boundaries
from eagle3x.config import Hardware, TargetConfig
from eagle3x.diagnosis.known_answer import (
    BLOCKS,
    BOUNDARIES,
    EOS,
    PROMPT,
    Corruption,
    KnownAnswer,
    Variant,
    build,
    corrupted,
    variants,
)
from eagle3x.diagnosis.replay import ReplaySample, replay
from eagle3x.drafters.checkpoint import load
from eagle3x.engines import adapter
from eagle3x.engines.base import Engine
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.targets import Target, resolve
from eagle3x.types import Request, SpecCounters, TokenSample, total

JOB = Job(longest=512, logs=Path("logs"))

CPU = Hardware(device="cpu", threads=None, devices=None)
NAMES = (
    "right",
    "slot_0_early", "slot_1_early", "slot_2_early", "all_early",
    "slot_0_late", "slot_1_late", "slot_2_late", "all_late",
    "default_boundaries", "missing_ids",
    "slots_102", "slots_021", "slots_210", "slots_120", "slots_201",
)  # fmt: skip


def slot() -> Slot:
    backend = Backend(
        name="transformers", runner="auto",
        dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8, engine_args={},
        python=None, url=None, port=None, memory_fraction=0.85, start_timeout=60.0,
    )  # fmt: skip
    return Slot("serve", backend, Quantization("none"), Attention("auto"))


@dataclass
class Pair:
    known: KnownAnswer
    target: Target
    engine: Engine

    def measure(self, drafter: Path, requests: list[Request], concurrency: int) -> dict[str, tuple]:
        with self.engine.serve(drafter, Speculation.chain(self.known.num_speculative_tokens)) as endpoint:
            done = {c.id: (c.token_ids, c.counters) for c in endpoint.complete(requests, concurrency)}
            assert endpoint.totals() == total([counters for _, counters in done.values() if counters is not None])
        return done


def opened(known: KnownAnswer) -> Pair:
    target = resolve(
        TargetConfig(
            name="known", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
            trust_remote_code=False, aux_layer_ids=known.boundaries,
        )
    )  # fmt: skip
    return Pair(known, target, adapter("transformers").open(slot(), target, CPU, JOB))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return opened(build(tmp_path_factory.mktemp("known")))


@pytest.fixture(scope="module")
def made(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Variant]:
    return {v.name: v for v in variants(pair.known, tmp_path_factory.mktemp("variants"))}


def test_the_permutation_by_hand(pair: Pair) -> None:
    assert pair.known.text(PROMPT, 4) == (5, 7, 9, 11)
    assert pair.known.text((61,), 3) == (4, 6, 8)  # odd tokens are followed by even ones
    assert pair.known.text((62,), 2) == (3, 5)
    assert sorted(pair.known.successor) == list(range(64))


def test_all_variants_are_made(made: dict[str, Variant]) -> None:
    assert tuple(made) == NAMES
    assert [v.tau for v in made.values()] == [4.0] + [1.0] * (len(NAMES) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_ids_mean_what_the_variant_says_on_every_engine(made: dict[str, Variant], name: str) -> None:
    variant = made[name]
    config = json.loads((variant.drafter_dir / "config.json").read_text())
    for reader in (
        Reader("vllm", runner="v1"),
        Reader("vllm", runner="v2"),
        Reader("sglang", "0.5.23", "LlamaForCausalLM"),
    ):
        assert predicted_boundaries(reader, config, BLOCKS) == variant.fed
    if variant.names_ids:
        assert predicted_boundaries(Reader("transformers"), config, BLOCKS) == variant.fed


@pytest.mark.parametrize("name", NAMES)
def test_tau_on_transformers(pair: Pair, made: dict[str, Variant], name: str) -> None:
    variant = made[name]
    if not variant.names_ids:
        with pytest.raises(CaptureError, match="names no"):
            pair.engine.serve(variant.drafter_dir, Speculation.chain(3))
        return
    prompts = {"a": PROMPT, "b": (5, 30), "c": tuple(range(3, 33)), "d": (62,)}
    requests = [Request(i, p, 21) for i, p in prompts.items()]
    for concurrency in (1, 3) if name == "right" else (3,):
        for request_id, (output, counters) in pair.measure(variant.drafter_dir, requests, concurrency).items():
            assert output == pair.known.text(prompts[request_id], 21)
            # 1 token from the prefill, then 20: 4 a step if every draft is right, 1 a step if none is.
            assert counters == (SpecCounters(5, 15, (5, 5, 5)) if name == "right" else SpecCounters(20, 60, (0, 0, 0)))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_tau_is_k_plus_one_for_other_k(pair: Pair, k: int) -> None:
    with pair.engine.serve(pair.known.drafter_dir, Speculation.chain(k)) as endpoint:
        (done,) = endpoint.complete([Request("a", PROMPT, 1 + 4 * (k + 1))], 1)
    assert done.counters == SpecCounters(4, 4 * k, (4,) * k)


def test_stop_in_mid_draft_is_cut_and_counted_past_the_stop(tmp_path: Path) -> None:
    pair = opened(build(tmp_path, 3, eos_at=6))
    expected = {
        # Prefill 5; step 1: 7 9 11 and 13 as bonus; step 2: 2 (stop), 15, 17 drafted and accepted, 19 as bonus.
        "stop": ((5, 7, 9, 11, 13, EOS), SpecCounters(2, 6, (2, 2, 2)), "stop"),
        "on": ((5, 7, 9, 11, 13, EOS, 15, 17, 19), SpecCounters(2, 6, (2, 2, 2)), "length"),
        # The last token of three lies in step 1: what is accepted behind it counts too.
        "short": ((5, 7, 9), SpecCounters(1, 3, (1, 1, 1)), "length"),
        "prefill": ((5,), SpecCounters(0, 0, (0, 0, 0)), "length"),
    }
    requests = [
        Request("stop", PROMPT, 30),
        Request("on", PROMPT, 9, ignore_eos=True),
        Request("short", PROMPT, 3),
        Request("prefill", PROMPT, 1),
    ]
    with pair.engine.serve(pair.known.drafter_dir, Speculation.chain(3)) as endpoint:
        done = {c.id: (c.token_ids, c.counters, c.finish) for c in endpoint.complete(requests, 3)}
    assert done == expected
    for request in requests:
        args = request.prompt_ids, request.max_tokens, request.ignore_eos
        assert (pair.known.output(*args), pair.known.counters(*args)) == done[request.id][:2]


def test_stop_token_from_the_prefill(tmp_path: Path) -> None:
    pair = opened(build(tmp_path, 3, eos_at=1))
    done = pair.measure(pair.known.drafter_dir, [Request("a", PROMPT, 30)], 1)
    assert done == {"a": ((EOS,), SpecCounters(0, 0, (0, 0, 0)))}


def test_tokens_missing_from_the_draft_vocabulary(tmp_path: Path) -> None:
    pair = opened(build(tmp_path, 3, missing=(9, 17)))
    # Anchors and drafts: 5 | 7 (9) -> anchor 9 | 11 13 15 -> bonus 17 | 19 21 23 -> bonus 25 | 27 29 31 -> 33.
    done = pair.measure(pair.known.drafter_dir, [Request("a", PROMPT, 15)], 1)
    assert done["a"] == (tuple(range(5, 34, 2)), SpecCounters(4, 12, (4, 3, 3)))
    assert pair.known.counters(PROMPT, 15) == SpecCounters(4, 12, (4, 3, 3))


def streams(pair: Pair, token_ids: tuple[int, ...]) -> list[Tensor]:
    (states,) = pair.engine.capture([TokenSample("a", token_ids)], range(BLOCKS + 1))
    return list(states.aux.chunk(BLOCKS + 1, dim=-1))


def test_boundaries_hold_their_tags(pair: Pair) -> None:
    for b, stream in enumerate(streams(pair, PROMPT)):
        expected = torch.zeros(len(PROMPT), 128)
        expected[range(len(PROMPT)), PROMPT] = 1
        expected[:, 64] = expected[:, 65 + b] = 1
        torch.testing.assert_close(stream, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("corruption", ["none", "early", "late", "swapped", "normed", "without_residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_replay_of_faulty_states(pair: Pair, corruption: Corruption, slot: int, dtype: torch.dtype) -> None:
    text = PROMPT + pair.known.text(PROMPT, 21 + 8)
    # Half precision stands for the rounding of engines: the margins must not need float32.
    rounded = [s.to(dtype).float() * (1 if dtype == torch.float32 else 1.004) for s in streams(pair, text)]
    aux = corrupted(rounded, BOUNDARIES, corruption, slot)
    drafter = load(pair.known.drafter_dir, pair.target)
    (counters,) = replay(drafter, [ReplaySample("a", torch.tensor(text), aux, len(PROMPT), 21)], 3)
    assert counters == (SpecCounters(5, 15, (5, 5, 5)) if corruption == "none" else SpecCounters(20, 60, (0, 0, 0)))


@pytest.mark.parametrize(
    ("missing", "eos_at", "tokens"), [((), None, 21), ((9, 17), None, 15), ((), 6, 6), ((11,), 7, 7)]
)
def test_replay_counts_as_the_engine(tmp_path: Path, missing: tuple[int, ...], eos_at: int | None, tokens: int) -> None:
    pair = opened(build(tmp_path, 3, missing, eos_at))
    served = pair.measure(pair.known.drafter_dir, [Request("a", PROMPT, tokens)], 1)["a"][1]
    text = PROMPT + pair.known.text(PROMPT, tokens + 8)
    (states,) = pair.engine.capture([TokenSample("a", text)], BOUNDARIES)
    drafter = load(pair.known.drafter_dir, pair.target)
    sample = ReplaySample("a", torch.tensor(text), states.aux, len(PROMPT), tokens)
    assert replay(drafter, [sample], 3) == [served] == [pair.known.counters(PROMPT, tokens)]


def test_bfloat16_weights_and_states_keep_the_answer(pair: Pair) -> None:
    """Float32 arithmetic on values rounded to bfloat16 after every product, as a bfloat16 engine stores them."""
    drafter = load(pair.known.drafter_dir, pair.target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16().float())

    def rounding(_module: torch.nn.Module, _args: object, output: Tensor) -> Tensor:
        return output.bfloat16().float()

    for module in drafter.modules():
        if not list(module.children()):
            module.register_forward_hook(rounding)
    text = PROMPT + pair.known.text(PROMPT, 21 + 8)
    aux = corrupted([s.bfloat16().float() for s in streams(pair, text)], BOUNDARIES, "none", 0)
    (counters,) = replay(drafter, [ReplaySample("a", torch.tensor(text), aux, len(PROMPT), 21)], 3)
    assert counters == SpecCounters(5, 15, (5, 5, 5))
