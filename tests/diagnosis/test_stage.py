"""The diagnose stage on the known-answer pair: tau is k+1 on every rung, and 1 from where a fault is planted on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle3x.benchmark import measure
from eagle3x.benchmark.config import Benchmark, Speculation
from eagle3x.config import Config, Hardware, TargetConfig
from eagle3x.data.config import Sampling
from eagle3x.data.records import write_responses
from eagle3x.diagnosis import stage
from eagle3x.diagnosis.config import Diagnose
from eagle3x.diagnosis.faults import tamper
from eagle3x.diagnosis.known_answer import BLOCKS, KnownAnswer, build
from eagle3x.diagnosis.planted import Fault, called
from eagle3x.drafters.export import rewrite_ids
from eagle3x.engines.config import Attention, Backend, Quantization, Slot
from eagle3x.engines.transformers import TransformersEngine
from eagle3x.pipeline import StageRun
from eagle3x.targets import Target, resolve
from eagle3x.types import HiddenStates, Response, TokenSample

K, TOKENS = 3, 14
PROMPTS = {f"p{i}": (11 + i, 4, 3 + 5 * i) for i in range(8)}
MORE_PROMPTS = {f"p{i}": (11 + i, 4, 3 + 4 * i) for i in range(14)}
"""The finder shows nothing with fewer than a dozen."""
BENCHMARK = Benchmark(
    max_prompts=None, acceptance_concurrency=4, temperatures=(0.0,), top_p=1.0, timing=False, timing_prompts=3,
    timing_tokens=6, timing_concurrency=(1,), timing_rounds=1, warmup_requests=0, resamples=400, confidence=0.95,
    near_tie=1e-4,
)  # fmt: skip
BACKEND = Backend(
    name="transformers", runner="auto", dtype="float32", kv_cache_dtype="auto", tensor_parallel=1, batch_size=4,
    engine_args={}, python=None, url=None, port=None, memory_fraction=0.8, start_timeout=1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> KnownAnswer:
    return build(tmp_path_factory.mktemp("pair"), K)


@pytest.fixture(scope="module")
def target(known: KnownAnswer) -> Target:
    return resolve(
        TargetConfig(name="known", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
                     trust_remote_code=False, aux_layer_ids=known.boundaries)
    )  # fmt: skip


def responses(known: KnownAnswer, prompts: Mapping[str, tuple[int, ...]], foreign: bool = False) -> list[Response]:
    """What the target writes, or another one (`foreign`)."""
    found = []
    for name, prompt in prompts.items():
        tokens = (*prompt, *known.text((*prompt, 1) if foreign else prompt, TOKENS + K))
        labels = tuple(len(prompt) <= at < len(prompt) + TOKENS for at in range(len(tokens)))
        found.append(Response(name, "all", "eval", tokens, labels, len(prompt), TOKENS, "length"))
    return found


def slot(role: Any) -> Slot:
    return Slot(role, BACKEND, Quantization(scheme="none"), Attention(name="auto"))


def diagnosed(
    folder: Path,
    known: KnownAnswer,
    target: Target,
    faults: Sequence[Fault] = (),
    fed: tuple[int, ...] | None = None,
    source: str = "custom",
    served: bool = True,
    edit: Callable[[Path], None] | None = None,
    trained: tuple[int, ...] | None = None,
    finder: bool = False,
    elsewhere: bool = False,
) -> dict[str, Any]:
    """Export with the faults, serve, diagnose.

    fed: boundaries that are written into the served config by hand. edit: what is done to the benchmark's folder.
    trained: boundaries that the drafter's states are said to have had, if not the right ones. elsewhere: the eval text
    is another target's, and what serves is not what captured.
    """
    texts, drafter, export = folder / "responses", folder / "drafter", folder / "export"
    texts.mkdir(parents=True)
    write_responses(texts, responses(known, MORE_PROMPTS if finder else PROMPTS, elsewhere))
    shutil.copytree(known.drafter_dir, drafter / "checkpoint")
    shutil.copytree(known.drafter_dir, export / "checkpoint")
    if faults:
        tamper(export / "checkpoint", faults, target)
    if fed is not None:
        rewrite_ids(export / "checkpoint", fed, target)
    claimed = list(trained or known.boundaries)
    record = {"trained_boundaries": claimed, "num_blocks": BLOCKS, "sglang_refused": None, "note": None}
    (export / "export.json").write_text(json.dumps(record))
    cfg = SimpleNamespace(
        benchmark=BENCHMARK, speculation=Speculation.chain(K), hardware=Hardware("cpu", 1, None), seed=1, planted=(),
        drafter=SimpleNamespace(source=source),
        diagnose=Diagnose(finder_prompts=len(MORE_PROMPTS) if finder else 0, drift_prompts=4 if elsewhere else 0),
        sampling=Sampling(temperature=0.0, top_p=1.0, max_new_tokens=TOKENS, eval_max_new_tokens=TOKENS,
                          continuation_tokens=8),
    )  # fmt: skip
    slots = {"serve": slot("serve"), "extract": slot("extract")}
    if elsewhere:
        slots["serve"] = replace(slots["serve"], backend=replace(BACKEND, batch_size=2))
    inputs: dict[str, Any] = {
        "export": SimpleNamespace(path=export),
        "responses": SimpleNamespace(path=texts),
        "drafter": SimpleNamespace(path=drafter),
    }
    failed = {} if served else {"benchmark": "serve: no such engine here"}
    if served:
        (folder / "benchmark").mkdir()
        measure.make(StageRun(cast(Config, cfg), folder / "benchmark", inputs, target, slots))
        if edit is not None:
            edit(folder / "benchmark")
        inputs["benchmark"] = SimpleNamespace(path=folder / "benchmark")
    (folder / "work").mkdir()
    stage.make(StageRun(cast(Config, cfg), folder / "work", inputs, target, slots, failed))
    return json.loads((folder / "work" / "diagnosis.json").read_text())


def taus(record: dict[str, Any]) -> list[float | None]:
    return [None if rung["tau"] is None else rung["tau"]["value"] for rung in record["rungs"]]


def named(record: dict[str, Any]) -> list[str]:
    return [cause["kind"] for cause in record["causes"]]


def test_a_healthy_drafter(tmp_path: Path, known: KnownAnswer, target: Target) -> None:
    record = diagnosed(tmp_path, known, target)
    assert taus(record) == [4.0] * 5
    assert named(record) == []
    assert [step["verdict"] for step in record["steps"]] == ["sound"] * 4
    grid = record["offset_quantization"]
    assert grid["hypothetical"] is True
    assert grid["shifted"] == [b + 1 for b in known.boundaries]
    assert [tau["value"] for tau in grid["taus"].values()] == [4.0, 1.0, 4.0, 1.0]
    assert grid["offset"]["value"] == -3.0
    assert grid["states"]["value"] == 0.0


@pytest.mark.parametrize("fault", ["columns_swapped", "d2t_missing", "stale_vocabulary", "other_target", "fc_lost"])
def test_a_fault_of_the_export_is_named(tmp_path: Path, known: KnownAnswer, target: Target, fault: Fault) -> None:
    record = diagnosed(tmp_path, known, target, [fault])
    first, *others = taus(record)
    assert first == 4.0
    assert all(tau is not None and tau < 3 for tau in others)
    assert (record["broken"], record["largest"]) == (["exported"], "exported")
    assert named(record) == [called(fault).kind]


def test_wrong_layers_are_named_where_they_are_fed(tmp_path: Path, known: KnownAnswer, target: Target) -> None:
    shifted = tuple(b - 1 for b in known.boundaries)
    record = diagnosed(tmp_path, known, target, fed=shifted)
    assert taus(record) == [4.0, 4.0, 4.0, 1.0, 1.0]
    assert named(record) == ["offset_serving"]
    assert str(list(shifted)) in record["causes"][0]["sentence"]
    assert record["causes"][0]["lost"]["value"] == -3.0
    assert record["offset_quantization"]["hypothetical"] is False


def test_two_faults_are_both_named(tmp_path: Path, known: KnownAnswer, target: Target) -> None:
    record = diagnosed(tmp_path, known, target, ["columns_swapped", "d2t_shifted"])
    assert sorted(named(record)) == ["columns_swapped", "d2t_shifted"]


def test_a_drafter_that_was_trained_on_other_states_than_it_says(
    tmp_path: Path, known: KnownAnswer, target: Target
) -> None:
    said = tuple(b - 1 for b in known.boundaries)
    record = diagnosed(tmp_path, known, target, fed=said, trained=said, finder=True)
    assert taus(record) == [1.0] * 5  # nothing is lost on the way: it was wrong before
    assert record["broken"] == []
    [cause] = record["causes"]
    assert (cause["kind"], cause["rung"]) == ("offset_training", "trained")
    assert str(known.boundaries)[1:-1] in cause["sentence"]
    assert record["finder"]["corrected"]["tensors"] == []


def test_what_the_export_did_is_not_asked_of_the_finder(tmp_path: Path, known: KnownAnswer, target: Target) -> None:
    """It looks at what training left: a fault of the export is known from the weights."""
    record = diagnosed(tmp_path, known, target, ["d2t_shifted"], finder=True)
    assert named(record) == ["d2t_shifted"]
    assert record["finder"]["tau"]["value"] == 4.0
    assert record["finder"]["named"] == []
    record = diagnosed(tmp_path / "elsewhere", known, target, ["d2t_shifted"], source="pretrained", finder=True)
    assert named(record) == ["d2t_shifted"]
    assert record["finder"]["tau"]["value"] == 1.0


def test_a_drafter_from_elsewhere_has_no_first_rung(tmp_path: Path, known: KnownAnswer, target: Target) -> None:
    record = diagnosed(tmp_path, known, target, source="pretrained")
    assert taus(record) == [None, 4.0, 4.0, 4.0, 4.0]
    assert record["rungs"][0]["skipped"] == "the drafter was not trained here"


def test_without_an_engine_the_first_rungs_are_climbed(tmp_path: Path, known: KnownAnswer, target: Target) -> None:
    record = diagnosed(tmp_path, known, target, served=False)
    assert taus(record) == [4.0, 4.0, None, None, None]
    assert record["rungs"][4]["skipped"] == "serve: no such engine here"
    assert record["offset_quantization"] is None


def test_the_served_rung_is_what_the_benchmark_counted(tmp_path: Path, known: KnownAnswer, target: Target) -> None:
    """An engine that accepts nothing though its own states would be accepted: not EAGLE-3 at work."""

    def nothing_accepted(benchmark: Path) -> None:
        file = benchmark / "acceptance.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            steps = len(line["token_ids"]) - 1
            line["counters"] = {"verify_steps": steps, "drafted": steps * K, "accepted_at": [0] * K}
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    record = diagnosed(tmp_path, known, target, edit=nothing_accepted)
    assert taus(record) == [4.0, 4.0, 4.0, 4.0, 1.0]
    assert named(record) == ["wrong_algorithm"]


def test_every_engine_is_asked_for_one_set_of_boundaries(
    tmp_path: Path, known: KnownAnswer, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a process of its own is loaded anew for another set: up to a minute each time."""
    asked: dict[TransformersEngine, set[tuple[int, ...]]] = {}
    capture = TransformersEngine.capture

    def noted(
        self: TransformersEngine, samples: Sequence[TokenSample], boundaries: Sequence[int]
    ) -> Iterator[HiddenStates]:
        asked.setdefault(self, set()).add(tuple(boundaries))
        return capture(self, samples, boundaries)

    monkeypatch.setattr(TransformersEngine, "capture", noted)
    late = tuple(b + 1 for b in known.boundaries)
    record = diagnosed(tmp_path, known, target, fed=late, elsewhere=True)
    assert taus(record)[2:] == [4.0, 1.0, 1.0]
    assert [b["boundary"] for b in record["drift"]["states"]["boundaries"]] == list(known.boundaries)
    assert [len(sets) for sets in asked.values()] == [1] * len(asked)
    assert len(asked) == 3, "the benchmark's, the extracting and the serving one"
