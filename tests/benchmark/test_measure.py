"""The benchmark stage on the known-answer pair: every counter is known before it runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from eagle3x.benchmark import measure
from eagle3x.benchmark.config import Benchmark, Speculation
from eagle3x.benchmark.measure import candidate_boundaries, make, open_reference, reference_slot, spread
from eagle3x.benchmark.records import parse_counters, read_batches, read_lines, requests
from eagle3x.config import Config, Hardware, TargetConfig
from eagle3x.data.config import Sampling
from eagle3x.data.records import write_responses
from eagle3x.diagnosis import reference
from eagle3x.diagnosis.known_answer import BLOCKS, KnownAnswer, Variant, build, variants
from eagle3x.diagnosis.streamed_reference import StreamedTarget
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.transformers import TransformersEngine
from eagle3x.pipeline import StageRun
from eagle3x.targets import Target, resolve
from eagle3x.types import EagleError, Request, Response, SpecCounters, TokenSample, total

K, TOKENS = 3, 14
PROMPTS = {f"{'code' if i % 2 else 'math'}-{i}": (11 + i, 4, 3 + 5 * i) for i in range(8)}
BENCHMARK = Benchmark(
    max_prompts=None, acceptance_concurrency=3, temperatures=(0.0, 0.7), top_p=0.9, timing=True, timing_prompts=3,
    timing_tokens=6, timing_concurrency=(1, 2), timing_rounds=1, warmup_requests=1,
    resamples=200, confidence=0.95, near_tie=1e-4,
)  # fmt: skip
SLOT = Slot(
    "serve",
    Backend(name="transformers", runner="auto", dtype="float32", kv_cache_dtype="auto", tensor_parallel=1, batch_size=4,
            engine_args={}, python=None, url=None, port=None, memory_fraction=0.8, start_timeout=1.0),
    Quantization(scheme="none"),
    Attention(name="auto"),
)  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> KnownAnswer:
    """Two tokens are not in the draft vocabulary, so requests differ; some reach the stop token, in mid-draft."""
    return build(tmp_path_factory.mktemp("pair"), K, missing=(21, 40), eos_at=12)


@pytest.fixture(scope="module")
def target(known: KnownAnswer) -> Target:
    return resolve(
        TargetConfig(name="known", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
                     trust_remote_code=False, aux_layer_ids=known.boundaries)
    )  # fmt: skip


@pytest.fixture(scope="module")
def wrong(known: KnownAnswer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Variant]:
    return {v.name: v for v in variants(known, tmp_path_factory.mktemp("variants"))}


def eval_responses(known: KnownAnswer) -> list[Response]:
    """What the target answers; three prompts' texts are of other models or do not go on, so the engine must."""
    found = []
    for i, (name, prompt) in enumerate(PROMPTS.items()):
        output = known.output(prompt, TOKENS)
        further = known.text(prompt, len(output) + K)[len(output) :]
        if i == 2:
            output = (*output[:-1], 7)
        if i in (3, 4):
            further = further[:1]
        tokens = (*prompt, *output, *further)
        labels = tuple(len(prompt) <= at < len(prompt) + len(output) for at in range(len(tokens)))
        found.append(
            Response(
                name, name[:4], "eval", tokens, labels, len(prompt), len(output), "stop" if 2 in output else "length"
            )
        )
    return found


def stage_run(
    folder: Path, known: KnownAnswer, target: Target, drafter: Path, benchmark: Benchmark = BENCHMARK
) -> StageRun:
    work, export, texts = folder / "work", folder / "export", folder / "responses"
    work.mkdir(parents=True)
    texts.mkdir()
    shutil.copytree(drafter, export / "checkpoint")
    record = {"trained_boundaries": list(known.boundaries), "num_blocks": BLOCKS, "sglang_refused": None, "note": None}
    (export / "export.json").write_text(json.dumps(record))
    write_responses(texts, eval_responses(known))
    cfg = SimpleNamespace(
        benchmark=benchmark, speculation=Speculation.chain(K), hardware=Hardware("cpu", 1, None),
        seed=1, planted=(),
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=TOKENS, eval_max_new_tokens=TOKENS,
                          continuation_tokens=8),
    )  # fmt: skip
    inputs: Any = {"export": SimpleNamespace(path=export), "responses": SimpleNamespace(path=texts)}
    return StageRun(cast(Config, cfg), work, inputs, target, {"serve": SLOT})


@pytest.fixture(scope="module")
def measured(
    known: KnownAnswer, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    run = stage_run(tmp_path_factory.mktemp("right"), known, target, known.drafter_dir)
    facts = make(run)
    return run.work, facts


def cell_of(work: Path) -> dict[str, Any]:
    return json.loads((work / "cell.json").read_text())


def test_every_counter_is_the_known_one(known: KnownAnswer, measured: tuple[Path, dict[str, Any]]) -> None:
    served = {r.id: r.completion for r in requests(read_batches(measured[0] / "acceptance.jsonl"))}
    assert {n: c.counters for n, c in served.items()} == {n: known.counters(p, TOKENS) for n, p in PROMPTS.items()}
    assert {n: c.token_ids for n, c in served.items()} == {n: known.output(p, TOKENS) for n, p in PROMPTS.items()}
    assert {c.finish for c in served.values()} == {"stop", "length"}, "both ends must occur"
    assert len({c.counters for c in served.values()}) > 1, "requests must differ"


def test_the_cell_of_the_right_drafter(known: KnownAnswer, measured: tuple[Path, dict[str, Any]]) -> None:
    cell = cell_of(measured[0])
    everything = total([known.counters(p, TOKENS) for p in PROMPTS.values()])
    assert cell["tau"]["value"] == pytest.approx(1 + everything.accepted / everything.verify_steps)
    assert cell["identical_outputs"] == {"requests": 8, "rate": 1.0, "lossy": 0, "differences": []}
    assert (cell["replay"]["identical_counters"], cell["replay"]["verdict"]) == (8, "agree")
    assert cell["replay"]["paired_diff"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert {n: c["value"] for n, c in cell["replay"]["candidates"].items()} == {"b-1": 1.0, "b+1": 1.0, "default": 1.0}
    assert cell["boundaries"]["trained"] == cell["boundaries"]["predicted"] == [3, 5, 8]
    assert cell["boundaries"]["serve_probe"]["verdict"] == "matched"
    assert cell["mismatched"] is False
    assert measured[1]["tokens"] == sum(len(known.output(p, TOKENS)) for p in PROMPTS.values())


def test_the_timing_pass_has_fixed_lengths_and_its_own_tau(
    known: KnownAnswer, measured: tuple[Path, dict[str, Any]]
) -> None:
    legs = read_batches(measured[0] / "timing.jsonl")
    assert [(b.drafter, b.concurrency) for b in legs] == [
        (False, 1), (False, 2), (True, 1), (True, 2), (True, 1), (True, 2), (False, 1), (False, 2),
    ]  # fmt: skip
    assert {len(r.completion.token_ids) for r in requests(legs)} == {6}
    timed = list(PROMPTS)[:3]
    once = total([known.counters(PROMPTS[n], 6, ignore_eos=True) for n in timed])
    assert [b.totals for b in legs if b.drafter] == [once] * 4
    cell = cell_of(measured[0])
    assert list(cell["speedup"]) == ["1", "2"]
    assert cell["speedup"]["1"]["tau"] == pytest.approx(1 + once.accepted / once.verify_steps)


def test_sampled_text_is_counted_apart(known: KnownAnswer, measured: tuple[Path, dict[str, Any]]) -> None:
    """The known token is e^26 times as likely as the next one, so that every sample is the known text."""
    served = {r.id: r.completion for r in requests(read_batches(measured[0] / "acceptance_t0.7.jsonl"))}
    assert {n: c.counters for n, c in served.items()} == {n: known.counters(p, TOKENS) for n, p in PROMPTS.items()}
    assert all(c.top2_gaps is None for c in served.values()), "gaps are of greedy text: these requests sampled"
    cell = cell_of(measured[0])
    (sampled,) = cell["sampled"]
    assert sampled == {
        "temperature": 0.7, "top_p": 0.9, "requests": 8, "output_tokens": cell["output_tokens"],
        "tau": cell["tau"], "survival": cell["survival"],
    }  # fmt: skip


def test_text_goes_on_as_the_target_writes_it(known: KnownAnswer, measured: tuple[Path, dict[str, Any]]) -> None:
    lines = {line["id"]: line for line in read_lines(measured[0] / "texts.jsonl")}
    for name, prompt in PROMPTS.items():
        n = len(known.output(prompt, TOKENS))
        assert tuple(lines[name]["further"]) == known.text(prompt, n + K)[n:]


def test_a_drafter_fed_one_late_is_a_mismatched_cell_that_replay_predicts(
    known: KnownAnswer, target: Target, wrong: dict[str, Variant], tmp_path: Path
) -> None:
    run = stage_run(tmp_path, known, target, wrong["all_late"].drafter_dir, replace(BENCHMARK, timing=False))
    make(run)
    cell = cell_of(run.work)
    assert cell["tau"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert cell["mismatched"] is True
    assert (cell["boundaries"]["trained"], cell["boundaries"]["predicted"]) == ([3, 5, 8], [4, 6, 9])
    assert cell["replay"]["verdict"] == "agree"
    everything = total([known.counters(p, TOKENS) for p in PROMPTS.values()])
    assert cell["replay"]["candidates"]["b-1"]["value"] == pytest.approx(
        1 + everything.accepted / everything.verify_steps
    )
    assert cell["replay"]["candidates"]["b-1"]["boundaries"] == [3, 5, 8]
    assert cell["speedup"] is None


def test_a_drafter_that_names_no_ids_is_refused_before_anything_runs(
    known: KnownAnswer, target: Target, wrong: dict[str, Variant], tmp_path: Path
) -> None:
    run = stage_run(tmp_path, known, target, wrong["missing_ids"].drafter_dir)
    with pytest.raises(EagleError, match="cannot be served here"):
        make(run)
    assert list(run.work.iterdir()) == []


PASSES = ("acceptance.jsonl", "acceptance_t0.7.jsonl", "baseline.jsonl", "timing.jsonl", "texts.jsonl", "replay.jsonl")


@pytest.mark.parametrize("killed_in", range(len(PASSES)))
def test_a_killed_benchmark_goes_on_where_it_was(
    known: KnownAnswer, target: Target, measured: tuple[Path, dict[str, Any]], tmp_path: Path, killed_in: int
) -> None:
    run = stage_run(tmp_path, known, target, known.drafter_dir)
    for name in ("context.json", *PASSES[: killed_in + 1]):
        shutil.copy(measured[0] / name, run.work / name)
    torn = run.work / PASSES[killed_in]
    torn.write_bytes(torn.read_bytes()[:-20])
    before = {name: (run.work / name).read_bytes() for name in PASSES[:killed_in]}
    make(run)
    assert {name: (run.work / name).read_bytes() for name in before} == before, "finished passes are not made again"
    again, first = cell_of(run.work), cell_of(measured[0])
    for timed in (again, first):
        del timed["speedup"]
    assert again == first


def test_a_finished_benchmark_decodes_nothing_again(
    known: KnownAnswer, target: Target, measured: tuple[Path, dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(*_: object) -> Any:
        raise AssertionError("nothing is left to do")

    def generate(self: TransformersEngine, asked: Sequence[Request]) -> Iterator[Any]:
        assert not asked
        return iter(())

    run = stage_run(tmp_path, known, target, known.drafter_dir)
    for name in ("context.json", *PASSES):
        shutil.copy(measured[0] / name, run.work / name)
    monkeypatch.setattr(TransformersEngine, "serve", refuse)
    monkeypatch.setattr(TransformersEngine, "capture", refuse)
    monkeypatch.setattr(TransformersEngine, "generate", generate)
    make(run)
    assert cell_of(run.work) == cell_of(measured[0])


def test_replay_is_stored_for_every_request_and_candidate(
    known: KnownAnswer, measured: tuple[Path, dict[str, Any]]
) -> None:
    lines = {line["id"]: line for line in read_lines(measured[0] / "replay.jsonl")}
    for name, prompt in PROMPTS.items():
        want = known.counters(prompt, TOKENS)
        assert parse_counters(lines[name]) == want
        steps = len(known.output(prompt, TOKENS)) - 1
        nothing = SpecCounters(steps, K * steps, (0,) * K)
        others = {candidate: parse_counters(c) for candidate, c in lines[name]["others"].items()}
        assert others == dict.fromkeys(("b-1", "b+1", "default"), nothing)


def test_too_few_prompts_are_refused(known: KnownAnswer, target: Target, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="at least 2 eval prompts, not 1"):
        make(stage_run(tmp_path / "a", known, target, known.drafter_dir, replace(BENCHMARK, max_prompts=1)))


def test_prompts_are_taken_from_every_category_in_turn() -> None:
    items = ["a0", "a1", "a2", "b0", "b1", "c0"]
    categories = [i[0] for i in items]
    assert spread(items, categories, 3) == ["a0", "b0", "c0"]
    assert spread(items, categories, 4) == ["a0", "a1", "b0", "c0"]
    assert spread(items, categories, None) == spread(items, categories, 9) == items


def test_candidates_by_name() -> None:
    assert candidate_boundaries((2, 14, 26), (2, 14, 26), 30) == {
        "b": (2, 14, 26), "b-1": (1, 13, 25), "b+1": (3, 15, 27), "default": (2, 15, 27),
    }  # fmt: skip
    late = candidate_boundaries((5, 17, 29), (2, 14, 26), 30)
    assert late["trained"] == (2, 14, 26)
    # What does not exist is left out; what is there twice is there once.
    assert "b+1" not in candidate_boundaries((2, 14, 30), None, 30)
    assert "b-1" not in candidate_boundaries((0, 14, 26), None, 30)
    assert list(candidate_boundaries((3, 15, 27), (2, 14, 26), 30)) == ["b", "b-1", "b+1", "default"]
    assert "default" not in candidate_boundaries((1, 2), (1, 2), 30)


def test_a_reference_that_does_not_fit_is_streamed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3X_CACHE", str(tmp_path))
    sample = TokenSample("a", tuple((7 * i + 2) % 40 for i in range(30)))
    found = []
    for streams in (False, True):
        monkeypatch.setattr(reference, "must_stream", lambda *_, streams=streams: streams)
        with open_reference(SLOT, target, Hardware("cpu", None, None), Job(64, tmp_path)) as opened:
            assert isinstance(opened, StreamedTarget if streams else TransformersEngine)
            (states,) = opened.capture([sample], (1, 2))
            found.append(states)
    torch.testing.assert_close(found[0].aux, found[1].aux)
    torch.testing.assert_close(found[0].last, found[1].last)
    assert found[0].last_norm == found[1].last_norm


def test_the_reference_is_float32_and_quantized_as_what_is_served(tiny_target: Target) -> None:
    """Else a drafter that reads quantized states would be replayed on others, and no fault be found."""
    served = replace(SLOT, backend=replace(SLOT.backend, name="vllm"), quantization=Quantization(scheme="int4"))
    slot = reference_slot(served, tiny_target)
    assert (slot.backend.name, slot.backend.dtype, slot.quantization.scheme) == ("transformers", "float32", "int4")
    attached = replace(served, backend=replace(served.backend, url="http://127.0.0.1:1"))
    assert reference_slot(attached, tiny_target).quantization.scheme == "none"  # nobody knows what it serves


def test_a_drafter_served_elsewhere_is_replayed_on_the_reference(
    known: KnownAnswer, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = measure.adapter("transformers")

    def open_(slot: Slot, target: Target, hardware: Hardware, job: Job) -> Any:
        opened.append(slot.role)
        return real.open(slot, target, hardware, job)

    monkeypatch.setattr(measure, "_is_reference", lambda slot: False)
    monkeypatch.setattr(measure, "adapter", lambda name: SimpleNamespace(open=open_, identity=real.identity))
    run = stage_run(tmp_path, known, target, known.drafter_dir, replace(BENCHMARK, timing=False))
    make(run)
    assert opened == ["serve", "extract"]
    assert cell_of(run.work)["replay"]["identical_counters"] == 8
