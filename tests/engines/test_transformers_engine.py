"""Generation, capture and speculation of the transformers engine against transformers itself, on a tiny target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle3x.benchmark.config import Speculation
from eagle3x.config import Hardware
from eagle3x.drafters.checkpoint import load
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.engines import adapter
from eagle3x.engines.base import Engine
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.transformers_batches import by_length
from eagle3x.engines.transformers_model import GROUPED_SDPA, checked
from eagle3x.targets import Target
from eagle3x.types import Completion, EagleError, HiddenStates, Request, TokenSample

JOB = Job(longest=512, logs=Path("logs"))

CPU = Hardware(device="cpu", threads=None, devices=None)
BOUNDARIES = (1, 3, 5)


def slot(batch_size: int = 4, attention: str = "auto") -> Slot:
    backend = Backend(
        name="transformers", runner="auto",
        dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=batch_size,
        engine_args={}, python=None, url=None, port=None, memory_fraction=0.85, start_timeout=60.0,
    )  # fmt: skip
    return Slot("serve", backend, Quantization("none"), Attention(attention))


@pytest.fixture(scope="module")
def reference(tiny_target: Target) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_target.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def engine(request: pytest.FixtureRequest, tiny_target: Target) -> Iterator[Engine]:
    with adapter("transformers").open(slot(attention=request.param), tiny_target, CPU, JOB) as opened:
        yield opened


def prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 128, (length,), generator=generator).tolist())


def greedy_reference(model: PreTrainedModel, ids: tuple[int, ...], tokens: int) -> tuple[list[int], list[float]]:
    """Token by token, the whole text anew each time: no cache, no batch, no padding."""
    text, gaps = list(ids), []
    with torch.no_grad():
        for _ in range(tokens):
            top = model(input_ids=torch.tensor([text])).logits[0, -1].topk(2)
            text.append(int(top.indices[0]))
            gaps.append(float(top.values[0] - top.values[1]))
    return text[len(ids) :], gaps


def by_id(completions: Iterator[Completion]) -> dict[str, Completion]:
    return {c.id: c for c in completions}


LENGTHS = (3, 17, 9, 1, 40, 18, 5)


def test_greedy_equals_the_reference_with_more_requests_than_rows(engine: Engine, reference: PreTrainedModel) -> None:
    requests = [Request(str(n), prompt(n, n), 6 + n % 5, ignore_eos=True) for n in LENGTHS]
    done = by_id(engine.generate(requests))
    assert done.keys() == {str(n) for n in LENGTHS}
    for request in requests:
        expected, gaps = greedy_reference(reference, request.prompt_ids, request.max_tokens)
        assert done[request.id].token_ids == tuple(expected)
        assert done[request.id].finish == "length"
        assert done[request.id].top2_gaps == pytest.approx(gaps, abs=1e-4)


def test_stop_tokens(engine: Engine, reference: PreTrainedModel, tiny_target: Target) -> None:
    """Declare the fourth greedy token a stop token: the text ends with it, unless the stop is to be ignored."""
    ids = prompt(1, 12)
    expected, _ = greedy_reference(reference, ids, 8)
    stop = expected[3]
    first = expected.index(stop)
    stopping = adapter("transformers").open(slot(), dataclasses.replace(tiny_target, eos_token_ids=(2, stop)), CPU, JOB)
    done = by_id(stopping.generate([Request("a", ids, 8), Request("b", ids, 8, ignore_eos=True)]))
    assert (done["a"].token_ids, done["a"].finish) == (tuple(expected[: first + 1]), "stop")
    assert (done["b"].token_ids, done["b"].finish) == (tuple(expected), "length")


def test_sampling_depends_on_the_request_alone(engine: Engine) -> None:
    def requests(seeds: range) -> list[Request]:
        return [Request(str(s), prompt(s, 5 + s), 10, temperature=1.0, top_p=0.9, seed=s) for s in seeds]

    together = by_id(engine.generate([*requests(range(9)), Request("greedy", prompt(0, 8), 10)]))
    alone = {r.id: next(iter(engine.generate([r]))) for r in requests(range(9))}
    for request_id, completion in alone.items():
        assert together[request_id].token_ids == completion.token_ids
        assert completion.top2_gaps is None
    assert together["greedy"].top2_gaps is not None


def test_seeds_differ_and_repeat(engine: Engine) -> None:
    def text(seed: int) -> tuple[int, ...]:
        return next(iter(engine.generate([Request("a", prompt(0, 8), 16, temperature=1.5, seed=seed)]))).token_ids

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_sampled_frequencies_are_the_models(tiny_target: Target, reference: PreTrainedModel) -> None:
    engine = adapter("transformers").open(slot(batch_size=500), tiny_target, CPU, JOB)
    ids = prompt(3, 6)
    with torch.no_grad():
        expected = (reference(input_ids=torch.tensor([ids])).logits[0, -1] / 1.3).softmax(-1)
    requests = [Request(str(s), ids, 1, temperature=1.3, seed=s) for s in range(1500)]
    chosen = torch.tensor([c.token_ids[0] for c in engine.generate(requests)])
    share = chosen.bincount(minlength=128) / len(requests)
    deviation = (expected * (1 - expected) / len(requests)).sqrt()
    assert ((share - expected).abs() <= 4.5 * deviation + 1e-3).all()


def test_capture_equals_transformers_sample_by_sample(engine: Engine, reference: PreTrainedModel) -> None:
    samples = [TokenSample(str(n), prompt(n, n)) for n in (7, 30, 29, 28, 31, 1, 30)]
    seen = 0
    last_block_inputs = []
    hook = reference.model.norm.register_forward_pre_hook(lambda _m, args: last_block_inputs.append(args[0]))
    try:
        for states in engine.capture(samples, range(7)):
            with torch.no_grad():
                out = reference(input_ids=torch.tensor([states.token_ids]), output_hidden_states=True)
            expected = [*out.hidden_states[:6], last_block_inputs.pop()]
            assert states.last_norm == "post_norm"
            assert states.aux.shape == (len(states.token_ids), 7 * 32)
            assert states.aux.device.type == "cpu"
            torch.testing.assert_close(states.aux, torch.cat(expected, -1)[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(states.last, out.hidden_states[6][0], rtol=1e-4, atol=1e-4)
            assert states.aux.untyped_storage().nbytes() == states.aux.nbytes  # holds no padded batch
            seen += 1
    finally:
        hook.remove()
    assert seen == len(samples)


@pytest.mark.parametrize("boundaries", [(), (3, 1), (1, 1), (-1, 2), (2, 7)])
def test_impossible_boundaries(engine: Engine, boundaries: tuple[int, ...]) -> None:
    with pytest.raises(EagleError, match=r"0\.\.6"):
        engine.capture([TokenSample("a", (5,))], boundaries)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Mistral", "Granite"])
def test_other_model_classes(family: str) -> None:
    """The boundaries and logits of other Llama-like classes, and a refusal where the head is not all."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation=GROUPED_SDPA)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    wrapped = checked(model, "sdpa", family)
    ids = torch.tensor([prompt(1, 9)]).clamp_max(63)
    with torch.no_grad():
        hidden, taps = wrapped.forward(ids, torch.arange(9)[None], None, None, taps=(0, 1, 2))
        out = model(input_ids=ids, output_hidden_states=True)
    for tapped, expected in zip([*taps, hidden], out.hidden_states, strict=True):
        torch.testing.assert_close(tapped, expected)
    model.config.logits_scaling = model.logits_scaling = 7.0  # Granite's own scale of its logits
    if family == "Granite":
        with pytest.raises(EagleError, match="is the logits"):
            checked(model, "sdpa", family)


def test_runs_that_overlap_do_not_share_a_cache(engine: Engine, drafter: Path) -> None:
    endpoint = engine.serve(drafter, Speculation.chain(2))
    alone = by_id(endpoint.complete(requests(), 2))
    pairs = list(zip(endpoint.complete(requests(), 2), endpoint.complete(requests()[::-1], 2), strict=True))
    for run in zip(*pairs, strict=True):
        assert {c.id: (c.token_ids, c.counters) for c in run} == {
            i: (c.token_ids, c.counters) for i, c in alone.items()
        }


def test_native_ids_are_boundaries(engine: Engine) -> None:
    assert engine.native_layer_ids((0, 3, 6)) == [0, 3, 6]


def test_batches_by_length() -> None:
    assert by_length([10, 100, 99, 50, 90, 84], 2) == [[1, 2], [4, 5], [3], [0]]  # 84 fills 93 % of 90
    assert by_length([100, 84], 2) == [[0], [1]]  # but 84 % of 100
    assert by_length([2000, 2000, 2000], 8) == [[0, 1], [2]]  # 4096 padded tokens
    assert by_length([9000], 8) == [[0]]


# ---- speculation


@pytest.fixture(scope="module")
def drafter(
    tiny_target: Target, reference: PreTrainedModel, fit_drafter: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Fitted to the greedy text of half of `requests`, so that some drafts are right and some are wrong."""
    states = []
    for request in requests()[::2]:
        text = request.prompt_ids + tuple(greedy_reference(reference, request.prompt_ids, 36)[0])
        with torch.no_grad():
            hidden = reference(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
        aux = torch.cat([hidden[b] for b in BOUNDARIES], -1)[0]
        states.append(HiddenStates(request.id, text, aux, hidden[-1][0], "post_norm"))
    kept = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:100].sort().values
    return fit_drafter(tiny_target, states, BOUNDARIES, kept, 60, tmp_path_factory.mktemp("drafter") / "d")


def requests() -> list[Request]:
    return [Request(str(n), prompt(n, n), 12 + 7 * (n % 4), ignore_eos=n % 2 == 0) for n in (4, 23, 11, 1, 38, 16)]


def drafted_reference(
    model: PreTrainedModel, eagle: Eagle3, request: Request, k: int, eos: tuple[int, ...]
) -> tuple[list[int], list[int], int]:
    """Speculation without any cache: each verify step reads all text anew. Output, accepted per position, steps."""

    def drafts_after(text: list[int]) -> list[int]:
        with torch.no_grad():
            states = model(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            aux = torch.cat([states[b] for b in BOUNDARIES], -1)
            rows, chain = eagle.fuse(aux), list(text)
            for _ in range(k):
                tokens = torch.tensor([chain[1:]])
                positions = torch.arange(rows.shape[1])[None]
                state = eagle.step(rows, tokens, positions, eagle.new_cache(1, rows.shape[1]))[:, -1:]
                chain.append(int(eagle.to_target_ids(eagle.logits(state)[0, -1].argmax())))
                rows = torch.cat([rows, state], 1)
        return chain[len(text) :]

    greedy, _ = greedy_reference(model, request.prompt_ids, request.max_tokens + k + 1)
    wanted = request.max_tokens
    if not request.ignore_eos:
        wanted = next((i + 1 for i, t in enumerate(greedy[:wanted]) if t in eos), wanted)
    known, accepted_at, steps = 1, [0] * k, 0
    while known < wanted:
        drafts = drafts_after([*request.prompt_ids, *greedy[:known]])
        right = next((i for i in range(k) if drafts[i] != greedy[known + i]), k)
        for i in range(right):
            accepted_at[i] += 1
        steps, known = steps + 1, known + right + 1
    return greedy[:wanted], accepted_at, steps


@pytest.mark.parametrize("concurrency", [1, 4])
def test_speculation_equals_a_reference_without_caches(
    engine: Engine, reference: PreTrainedModel, tiny_target: Target, drafter: Path, concurrency: int
) -> None:
    eagle = load(drafter, tiny_target)
    accepted = 0
    with engine.serve(drafter, Speculation.chain(2)) as endpoint:
        done = by_id(endpoint.complete(requests(), concurrency))
        totals = endpoint.totals()
    assert totals is not None
    for request in requests():
        output, accepted_at, steps = drafted_reference(reference, eagle, request, 2, tiny_target.eos_token_ids)
        completion = done[request.id]
        assert completion.counters is not None
        assert completion.token_ids == tuple(output)
        assert completion.counters.verify_steps == steps
        assert completion.counters.drafted == 2 * steps
        assert completion.counters.accepted_at == tuple(accepted_at)
        accepted += sum(accepted_at)
    assert accepted == totals.accepted
    assert 0 < totals.accepted_at[1] < totals.accepted_at[0] < totals.verify_steps  # right and wrong ones
    assert totals.verify_steps == sum(c.counters.verify_steps for c in done.values() if c.counters is not None)


def test_with_and_without_the_drafter(engine: Engine, drafter: Path) -> None:
    plain = engine.serve(None, None)
    assert plain.totals() is None
    without = by_id(plain.complete(requests(), 3))
    with engine.serve(drafter, Speculation.chain(4)) as endpoint:
        assert endpoint.counts_past_stop
        assert endpoint.per_request_counters
        endpoint.flush_prefix_cache()
        done = by_id(endpoint.complete(requests(), 3))
    for request in requests():
        a, b = without[request.id], done[request.id]
        assert (a.token_ids, a.finish) == (b.token_ids, b.finish)
        assert a.counters is None
        assert a.top2_gaps == pytest.approx(b.top2_gaps, abs=1e-4)
        assert b.timing.start < b.timing.first_token <= b.timing.end
        assert len(b.top2_gaps or ()) == len(b.token_ids)


def test_wrong_boundaries_are_fed_as_the_config_says(engine: Engine, drafter: Path, tmp_path: Path) -> None:
    """Same weights, other ids: the drafts change, the output does not."""
    import json
    import shutil

    other = tmp_path / "other"
    shutil.copytree(drafter, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}))
    many = [Request(str(s), prompt(s, 10), 40, ignore_eos=True) for s in range(12)]
    right = engine.serve(drafter, Speculation.chain(1))
    wrong = engine.serve(other, Speculation.chain(1))
    a, b = by_id(right.complete(many, 6)), by_id(wrong.complete(many, 6))
    assert {i: c.token_ids for i, c in a.items()} == {i: c.token_ids for i, c in b.items()}
    assert right.totals() != wrong.totals()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("a", (), 4), "empty prompt"),
        (Request("a", (5,), 0), "at least 1"),
        (Request("a", (5,), 4, temperature=-0.7), "temperature must be"),
        (Request("a", (5,) * 500, 11), "needs 514 positions"),
        (Request("a", (5,), 4, top_p=0.0), "top_p"),
    ],
)
def test_requests_that_cannot_be_answered(engine: Engine, drafter: Path, request_: Request, words: str) -> None:
    endpoint = engine.serve(drafter, Speculation.chain(3))
    with pytest.raises(EagleError, match=words):
        endpoint.complete([Request("fine", (5,), 4), request_], 2)


def test_the_last_position_of_the_context_can_be_used(engine: Engine, drafter: Path) -> None:
    endpoint = engine.serve(drafter, Speculation.chain(3))
    (done,) = endpoint.complete([Request("a", prompt(0, 500), 9, ignore_eos=True)], 1)
    assert len(done.token_ids) == 9


def test_no_requests(engine: Engine) -> None:
    assert list(engine.generate([])) == []


def test_drafter_without_speculation_and_without_config(engine: Engine, drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="or neither"):
        engine.serve(drafter, None)
    with pytest.raises(EagleError, match=r"no config\.json"):
        engine.serve(tmp_path, Speculation.chain(1))


def test_closed_engine(tiny_target: Target) -> None:
    with adapter("transformers").open(slot(), tiny_target, CPU, JOB) as opened:
        pass
    with pytest.raises(EagleError, match="closed"):
        opened.generate([Request("a", (5,), 1)])


def test_weights_that_are_missing(tiny_target: Target, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    broken: Any = shutil.copytree(tiny_target.path, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EagleError, match=r"layers\.2\.mlp\.up_proj\.weight"):
        adapter("transformers").open(slot(), dataclasses.replace(tiny_target, path=broken), CPU, JOB)
