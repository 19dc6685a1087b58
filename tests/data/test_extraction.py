"""The hidden_states stage, on an engine whose states can be worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eagle3x.diagnosis.probe as probe
import eagle3x.engines as engines
from eagle3x.config import Hardware
from eagle3x.data import extraction, shards
from eagle3x.data.records import write_responses
from eagle3x.data.shards import Shards
from eagle3x.engines.config import Attention, Backend, Quantization, Slot
from eagle3x.targets import Target
from eagle3x.types import EagleError, HiddenStates, Response, Split, TokenSample

H = 32


def expected_aux(token_ids: Sequence[int], boundaries: Sequence[int]) -> torch.Tensor:
    """State of token t at boundary b: 100 b + t in every place."""
    columns = [torch.tensor(token_ids).float()[:, None].expand(-1, H) + 100 * b for b in boundaries]
    return torch.cat(columns, dim=-1)


class Engine:
    """Keeps a record of what it was asked; may die after some samples, or lose or repeat one."""

    def __init__(self) -> None:
        self.asked: list[list[TokenSample]] = []
        self.dies_after: int | None = None
        self.drops: str | None = None
        self.repeats: str | None = None
        self.dtype = torch.float32
        self.open = False

    def __enter__(self) -> Engine:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        assert self.open
        self.asked.append(list(samples))
        for n, s in enumerate(samples):
            if self.dies_after == n:
                raise EagleError("the engine died")
            aux = expected_aux(s.token_ids, boundaries).to(self.dtype)
            last = -torch.tensor(s.token_ids).float()[:, None].expand(-1, H).to(self.dtype)
            if s.id != self.drops:
                yield HiddenStates(s.id, s.token_ids, aux, last, "post_norm")
            if s.id == self.repeats:
                yield HiddenStates(s.id, s.token_ids, aux, last, "post_norm")


class Verdict:
    def __init__(self, matched: bool) -> None:
        self.matched = matched

    def describe(self) -> str:
        return "columns are permuted" if not self.matched else "matched"

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.describe()}


@dataclasses.dataclass
class Stage:
    """A run of the stage with the pieces around it replaced."""

    engine: Engine
    run: Any
    probed: list[tuple[int, ...]]
    matched: bool = True

    def make(self) -> dict[str, Any]:
        return extraction.make(self.run)


def response(id: str, split: Split, tokens: int, cut: int = 0, empty: bool = False) -> Response:
    ids = tuple(3 + i % 100 for i in range(tokens))
    mask = tuple(i >= 2 and not empty for i in range(tokens))
    return Response(id, "math", split, ids, mask, 2, tokens - 2, "stop", cut)


RESPONSES = [
    response("t0", "train", 5), response("t1", "train", 30, cut=7), response("t2", "train", 9),
    response("unwritten", "train", 8, cut=2, empty=True), response("v0", "val", 6), response("e0", "eval", 12),
    response("e1", "eval", 4, empty=True),
]  # fmt: skip


@pytest.fixture
def stage(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> Stage:
    source = tmp_path / "responses"
    source.mkdir()
    write_responses(source, RESPONSES)
    backend = Backend(
        name="transformers", runner="auto",
        dtype="float32", kv_cache_dtype="auto", tensor_parallel=1, batch_size=4, engine_args={},
        python=None, url=None, port=None, memory_fraction=0.9, start_timeout=60.0,
    )  # fmt: skip
    slot = Slot("extract", backend, Quantization("none"), Attention("auto"))
    run = SimpleNamespace(
        cfg=SimpleNamespace(
            capture=SimpleNamespace(offset=1, dtype="auto", probe_tokens=24),
            hardware=SimpleNamespace(device="cpu"),
            hidden_states=SimpleNamespace(source=None),
        ),
        work=tmp_path / "work",
        inputs={"responses": SimpleNamespace(path=source)},
        target=tiny_target,
        slot=lambda role: {"extract": slot}[role],
    )
    run.work.mkdir()
    made = Stage(Engine(), run, [])

    def open_engine(given: object, target: Target, hardware: object, job: object) -> Engine:
        assert (given, target, hardware) == (slot, tiny_target, run.cfg.hardware)
        return made.engine

    def probe_capture(engine: Engine, target: Target, boundaries: Sequence[int], tokens: Sequence[int]) -> Verdict:
        assert engine is made.engine
        assert not list(run.work.rglob("*.safetensors"))
        made.probed.append(tuple(tokens))
        return Verdict(made.matched)

    monkeypatch.setattr(engines, "adapter", lambda name: {"transformers": SimpleNamespace(open=open_engine)}[name])
    monkeypatch.setattr(probe, "probe_capture", probe_capture)
    return made


def test_writes_the_states_of_every_split(stage: Stage) -> None:
    facts = stage.make()
    # Ids (1, 3, 4) with offset 1.
    assert facts["boundaries"] == [2, 4, 5]
    assert facts["splits"] == {
        "train": {"responses": 4, "samples": 3, "tokens": 44, "empty_masks": 1, "cut_samples": 2, "cut_tokens": 9},
        "val": {"responses": 1, "samples": 1, "tokens": 6, "empty_masks": 0, "cut_samples": 0, "cut_tokens": 0},
        "eval": {"responses": 2, "samples": 2, "tokens": 16, "empty_masks": 1, "cut_samples": 0, "cut_tokens": 0},
    }
    assert facts["tokens"] == 66
    assert facts["capture_probe"] == {"verdict": "matched"}
    assert (facts["dtype"], facts["last_norm"]) == ("float32", "post_norm")
    files = list(stage.run.work.rglob("*.safetensors"))
    assert facts["bytes"] == sum(f.stat().st_size for f in files)
    wanted = {r.id: r for r in RESPONSES if r.id != "unwritten"}
    for split in ("train", "val", "eval"):
        for sample in Shards(stage.run.work / split):
            r = wanted.pop(sample.id)
            assert r.split == split
            assert sample.token_ids.tolist() == list(r.token_ids)
            assert sample.loss_mask.tolist() == list(r.loss_mask)
            assert torch.equal(sample.aux, expected_aux(r.token_ids, (2, 4, 5)))
            assert torch.equal(sample.last[:, 0], -torch.tensor(r.token_ids).float())
            assert (sample.prompt_tokens, sample.response_tokens) == (r.prompt_tokens, r.response_tokens)
    assert not wanted
    assert not stage.engine.open


def test_captures_the_longest_first(stage: Stage) -> None:
    stage.make()
    assert [s.id for s in stage.engine.asked[1]] == ["t1", "t2", "t0"]  # asked[0] is the peek at the dtype


def test_probes_with_the_longest_text(stage: Stage) -> None:
    stage.make()
    assert stage.probed == [RESPONSES[1].token_ids[:24]]


def test_nothing_is_written_when_the_probe_fails(stage: Stage) -> None:
    stage.matched = False
    with pytest.raises(EagleError, match=r"does not capture boundaries \[2, 4, 5\].*columns are permuted"):
        stage.make()
    assert not list(stage.run.work.rglob("*"))


@pytest.mark.parametrize(("configured", "stored"), [("auto", "bfloat16"), ("float16", "float16")])
def test_stores_the_configured_dtype(stage: Stage, configured: str, stored: str) -> None:
    stage.engine.dtype = torch.bfloat16
    stage.run.cfg.capture.dtype = configured
    assert stage.make()["dtype"] == stored
    assert Shards(stage.run.work / "val")[0].aux.dtype == getattr(torch, stored)


def test_resumes_without_capturing_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "TOKENS_PER_SHARD", 10)
    stage.engine.dies_after = 2
    with pytest.raises(EagleError, match="the engine died"):
        stage.make()
    # t1 (30 tokens) is a shard of its own; t2 was in the open one.
    stage.engine.asked.clear()
    stage.engine.dies_after = None
    monkeypatch.setattr(probe, "probe_capture", lambda *_: Verdict(True))
    facts = stage.make()
    assert [[s.id for s in samples] for samples in stage.engine.asked[1:]] == [["t2", "t0"], ["v0"], ["e0", "e1"]]
    assert facts["splits"]["train"]["samples"] == 3
    train = Shards(stage.run.work / "train")
    assert [s.id for s in train] == ["t1", "t2", "t0"]
    train.verify()
    stage.engine.asked.clear()
    assert stage.make() == facts  # a kill after the last shard: same facts, nothing captured but the peek
    assert len(stage.engine.asked) == 1


def test_asks_the_disk_before_capturing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(EagleError, match="GiB free"):
        stage.make()
    assert len(stage.engine.asked) == 1  # the peek
    assert not list(stage.run.work.rglob("*.safetensors"))


def test_refuses_an_engine_that_loses_a_sample(stage: Stage) -> None:
    stage.engine.drops = "v0"
    with pytest.raises(EagleError, match="no states for 1 val samples: v0"):
        stage.make()


def test_refuses_an_engine_that_repeats_a_sample(stage: Stage) -> None:
    stage.engine.repeats = "t2"
    with pytest.raises(EagleError, match="states of t2, which was not asked for or came twice"):
        stage.make()


def test_refuses_text_that_teaches_nothing(stage: Stage) -> None:
    write_responses(stage.run.inputs["responses"].path, [r for r in RESPONSES if not r.id.startswith("t")])
    with pytest.raises(EagleError, match="nothing to train on"):
        stage.make()


def test_refuses_ids_that_are_not_distinct(stage: Stage) -> None:
    write_responses(stage.run.inputs["responses"].path, [*RESPONSES, response("t0", "eval", 5)])
    with pytest.raises(EagleError, match="same id: t0"):
        stage.make()


def test_states_of_the_real_engine_are_those_of_transformers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine and probe as they are, against `output_hidden_states` of an independent forward."""
    from transformers import AutoModelForCausalLM

    monkeypatch.undo()
    target = stage.run.target
    stage.run.cfg.hardware = Hardware(device="cpu", threads=None, devices=None)
    facts = stage.make()
    assert facts["capture_probe"]["verdict"] == "matched"
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    for split in ("train", "val", "eval"):
        for sample in Shards(stage.run.work / split):
            with torch.no_grad():
                states = model(sample.token_ids[None], output_hidden_states=True).hidden_states
            torch.testing.assert_close(
                sample.aux, torch.cat([states[b][0] for b in (2, 4, 5)], -1), rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(sample.last, states[6][0], rtol=1e-4, atol=1e-4)
