"""The responses stage on a real engine: masks, greedy text past its stop, what is left out, and kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import eagle3x.engines
from eagle3x.composition import cells
from eagle3x.config import TargetConfig
from eagle3x.data import prompts, records, responses
from eagle3x.data.chat_template import ChatTemplate
from eagle3x.data.conversations import prompt_tokens
from eagle3x.data.response_parts import ResponseParts
from eagle3x.engines import adapter
from eagle3x.pipeline import STAGES, StageRun
from eagle3x.stage_view import View
from eagle3x.targets import Target, resolve
from eagle3x.types import Completion, EagleError, Message, Prompt, Request, Response, Timing

HERE = Path(__file__)
SMALL = (
    "data.limit_train=12", "data.limit_eval=4", "data.max_sample_tokens=256", "sampling.max_new_tokens=10",
    "sampling.eval_max_new_tokens=12", "sampling.continuation_tokens=4", "generate.backend.batch_size=3",
)  # fmt: skip


class Recording:
    """The transformers engine, with a list of what it was asked; it may end the process after some completions."""

    def __init__(self, kill_after: int | None = None) -> None:
        self.requests: list[Request] = []
        self.opened = 0
        self.kill_after = kill_after

    def __call__(self, name: str) -> Any:
        return SimpleNamespace(open=self.open) if name == "transformers" else adapter(name)  # type: ignore[arg-type]

    def open(self, *args: Any) -> Any:
        self.opened += 1
        self.engine = adapter("transformers").open(*args)
        return self

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        self.requests += requests
        for i, completion in enumerate(self.engine.generate(requests)):
            if i == self.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield completion

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.__exit__(None, None, None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording()
    monkeypatch.setattr(eagle3x.engines, "adapter", recording)
    return recording


def stage(folder: Path, target: Target, *overrides: str, source: Sequence[Prompt] | None = None) -> StageRun:
    """A run of the stage in `folder`, on the builtin prompts or on `source`."""
    made, work = folder / "prompts", folder / "work"
    made.mkdir(parents=True, exist_ok=True)
    work.mkdir(exist_ok=True)
    cfg = cells([*SMALL, *overrides], multirun=False)[0].config
    if source is None:
        prompts.make(StageRun(View.of(cfg, ["data", "eval"], "prompts"), made, {}, target, {}))
    else:
        records.write_prompts(made, source)
    declared = STAGES["responses"]
    view = View.of(cfg, (*declared.identity, *declared.placement), "responses")
    inputs: Any = {"prompts": SimpleNamespace(path=made)}
    return StageRun(view, work, inputs, target, {"generate": cfg.generate_slot})


def prompt(id: str, split: Any, *texts: str) -> Prompt:
    turns = tuple(Message("assistant" if i % 2 else "user", t) for i, t in enumerate(texts))
    return Prompt(id, "chat", split, turns)


def greedy(model: Any, ids: Sequence[int], steps: int) -> list[int]:
    """Reference: the argmax of a whole forward per token, no cache, no batch."""
    import torch

    text = list(ids)
    with torch.inference_mode():
        for _ in range(steps):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def test_texts_masks_and_facts(tmp_path: Path, tiny_target: Target, engine: Recording) -> None:
    from transformers import AutoModelForCausalLM

    run = stage(tmp_path, tiny_target)
    facts = responses.make(run)
    got = records.read_responses(run.work)
    asked = records.read_prompts(tmp_path / "prompts")
    assert sorted(p.name for p in run.work.iterdir()) == [f"responses-{s}.parquet" for s in ("eval", "train", "val")]
    assert [r.id for r in got if r.split == "eval"] == [p.id for p in asked if p.split == "eval"]  # in their order
    assert {r.id for r in got} == {p.id for p in asked}

    model = AutoModelForCausalLM.from_pretrained(tiny_target.path).eval()
    stops = 0
    for r in got:
        assert r.cut_tokens == 0
        assert r.loss_mask == tuple(
            r.prompt_tokens <= i < r.prompt_tokens + r.response_tokens for i in range(len(r.token_ids))
        )
        limit, beyond = (10, 0) if r.split == "train" else (12, 4)
        expected = greedy(model, r.token_ids[: r.prompt_tokens], limit + beyond)
        length = expected.index(2) + 1 if 2 in expected[:limit] else limit
        stops += r.finish == "stop"
        assert r.finish == ("stop" if 2 in expected[:limit] else "length")
        assert r.response_tokens == length
        assert list(r.token_ids[r.prompt_tokens :]) == expected[: length + beyond]
    assert stops > 0, "the test needs a text that stops"

    by_split = {s: [r for r in got if r.split == s] for s in ("train", "val", "eval")}
    for name, members in by_split.items():
        counts = facts["splits"][name]
        assert counts["samples"] == len(members) > 0
        assert counts["prompt_tokens"] == sum(r.prompt_tokens for r in members)
        assert counts["response_tokens"] == sum(r.response_tokens for r in members)
        assert sum(counts["finish"].values()) == len(members)
        assert counts["finish"].get("stop", 0) == sum(r.finish == "stop" for r in members)
        assert counts["empty_masks"] == counts["cut_samples"] == counts["cut_tokens"] == 0
    assert facts["tokens"] == sum(len(r.token_ids) for r in got)
    assert facts["too_long"] == facts["shortened"] == 0
    assert facts["generated"]["requests"] == len(got) == len(engine.requests) == 16
    assert facts["generated"]["tokens"] == sum(r.response_tokens if r.split == "train" else 12 + 4 for r in got)


def test_what_is_asked(tmp_path: Path, tiny_target: Target, engine: Recording) -> None:
    responses.make(stage(tmp_path, tiny_target, "sampling.temperature=0.7", "sampling.top_p=0.9", "seed=5"))
    lengths = [len(r.prompt_ids) for r in engine.requests]
    assert lengths == sorted(lengths, reverse=True)
    splits = {p.id: p.split for p in records.read_prompts(tmp_path / "prompts")}
    train = [r for r in engine.requests if splits[r.id] == "train"]
    held = [r for r in engine.requests if splits[r.id] != "train"]
    assert {(r.temperature, r.top_p, r.max_tokens, r.ignore_eos) for r in train} == {(0.7, 0.9, 10, False)}
    assert {(r.temperature, r.max_tokens, r.ignore_eos) for r in held} == {(0.0, 16, True)}
    assert len({r.seed for r in train}) == len(train)

    same, other = Recording(), Recording()
    for recording, overrides in ((same, ["seed=5", "data.limit_train=6"]), (other, ["seed=6"])):
        eagle3x.engines.adapter = recording  # type: ignore[assignment]  # the fixture restores it
        responses.make(stage(tmp_path / str(len(overrides)), tiny_target, "sampling.temperature=0.7", *overrides))
    seeds = {r.id: r.seed for r in train}
    fewer = {r.id: r.seed for r in same.requests if r.id in seeds and not r.ignore_eos}
    assert 0 < len(fewer) < len(train)
    assert fewer == {id: seeds[id] for id in fewer}  # a request's seed does not depend on what else is asked
    assert all(r.seed != seeds[r.id] for r in other.requests if r.id in seeds)


def test_sampled_text_can_be_written_again(tmp_path: Path, tiny_target: Target) -> None:
    def texts(folder: str, seed: int) -> dict[str, tuple[int, ...]]:
        run = stage(tmp_path / folder, tiny_target, "sampling.temperature=1.0", f"seed={seed}")
        responses.make(run)
        return {r.id: r.token_ids for r in records.read_responses(run.work, "train")}

    first = texts("a", 0)
    assert texts("b", 0) == first
    assert texts("c", 1) != first


def test_a_killed_run_goes_on(tmp_path: Path, tiny_target: Target, engine: Recording) -> None:
    whole = stage(tmp_path / "whole", tiny_target)
    responses.make(whole)
    assert len(engine.requests) == 16

    killed = stage(tmp_path / "killed", tiny_target)
    child = subprocess.run(
        [sys.executable, str(HERE), str(tmp_path / "killed"), str(tiny_target.path), "7"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert not list(killed.work.glob("responses-*"))
    parts = sorted(p.name for p in (killed.work / "parts").iterdir())
    assert parts == ["000000.parquet", "000001.parquet"]  # two parts of three; the seventh was lost
    (killed.work / "parts" / "000002.parquet.partial").write_bytes(b"PAR1")  # what a kill while writing leaves

    engine.requests.clear()
    facts = responses.make(killed)
    assert len(engine.requests) == 16 - 6
    assert facts["generated"]["requests"] == 10
    assert records.read_responses(killed.work) == records.read_responses(whole.work)
    assert sorted(p.name for p in killed.work.iterdir()) == sorted(p.name for p in whole.work.iterdir())


def test_a_kill_while_the_parts_are_merged_loses_nothing(
    tmp_path: Path, tiny_target: Target, engine: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage(tmp_path, tiny_target)
    written: list[Path] = []
    real = records.write_table

    def dies_at_third(table: Any, path: Path) -> None:
        if path.name.startswith("responses-") and len(written) == 2:
            raise KeyboardInterrupt
        written.extend([path] if path.name.startswith("responses-") else [])
        real(table, path)

    monkeypatch.setattr("eagle3x.data.response_parts.write_table", dies_at_third)
    with pytest.raises(KeyboardInterrupt):
        responses.make(run)
    monkeypatch.setattr("eagle3x.data.response_parts.write_table", real)
    kept = tmp_path / "kept"
    shutil.copytree(run.work / "parts", kept)
    opened, asked = engine.opened, len(engine.requests)
    responses.make(run)
    finished = records.read_responses(run.work)
    assert len(finished) == 16
    # And once more with all final files and half of the parts.
    shutil.copytree(kept, run.work / "parts")
    (run.work / "parts" / "000000.parquet").unlink()
    responses.make(run)
    assert records.read_responses(run.work) == finished
    assert (engine.opened, len(engine.requests)) == (opened, asked)  # the target was not even loaded


def test_what_has_no_room(tmp_path: Path, tiny_target: Target, engine: Recording) -> None:
    # A prompt of n characters has n + 19 tokens: 6 + n + 2 for the turn, 11 for the header of the answer.
    source = [
        prompt("fits", "train", "x" * 21),  # 40 + 10 = 50
        prompt("shorter", "train", "x" * 25),  # 44: room for 6
        prompt("no room", "train", "x" * 31),  # 50
        prompt("val", "val", "x" * 15),  # 34 + 12 + 4 = 50
        prompt("eval", "eval", "x" * 15),
        prompt("eval too long", "eval", "x" * 16),
    ]
    run = stage(tmp_path, tiny_target, "data.max_sample_tokens=50", source=source)
    facts = responses.make(run)
    assert {r.id: r.max_tokens for r in engine.requests} == {"fits": 10, "shorter": 6, "val": 16, "eval": 16}
    assert (facts["too_long"], facts["shortened"]) == (2, 1)
    assert {r.id for r in records.read_responses(run.work)} == {"fits", "shorter", "val", "eval"}
    assert max(len(r.token_ids) for r in records.read_responses(run.work)) == 50


def test_given_answers(tmp_path: Path, tiny_target: Target, engine: Recording) -> None:
    source = [
        prompt("one", "train", "a", "bc"),  # 6 + 1 + 2 + 11 = 20, then 3
        prompt("cut", "train", "a", "b" * 60),  # 20 of prompt, 61 of answer
        prompt("empty", "train", "a" * 70, "b"),  # 89 of prompt
        prompt("val", "val", "a"),
        prompt("eval", "eval", "a"),
    ]
    run = stage(tmp_path, tiny_target, "data.max_sample_tokens=64", source=source)
    facts = responses.make(run)
    assert sorted(r.id for r in engine.requests) == ["eval", "val"]
    one, cut = records.read_responses(run.work, "train")  # a sample without a label is not there
    assert (one.id, one.prompt_tokens, one.response_tokens, one.finish, one.cut_tokens) == ("one", 20, 3, "given", 0)
    assert (cut.id, cut.prompt_tokens, cut.response_tokens, cut.cut_tokens) == ("cut", 20, 44, 17)
    train = facts["splits"]["train"]
    assert (train["samples"], train["empty_masks"], train["finish"]) == (2, 1, {"given": 3})
    assert (train["cut_samples"], train["cut_tokens"]) == (2, 17 + 27)  # 89 + 2 tokens of "empty" are 27 too many


def test_refusals(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(EagleError, match=r"data.max_sample_tokens=513 is more than the 512 positions of target"):
        responses.make(stage(tmp_path / "a", tiny_target, "data.max_sample_tokens=513"))
    source = [prompt("t", "train", "a"), prompt("v", "val", "b"), prompt("e", "eval", "x" * 40)]
    with pytest.raises(EagleError, match=r"no eval prompt leaves room for an answer in data.max_sample_tokens=64"):
        responses.make(stage(tmp_path / "b", tiny_target, "data.max_sample_tokens=64", source=source))


def test_an_engine_that_leaves_requests_unanswered(
    tmp_path: Path, tiny_target: Target, engine: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = Recording.generate
    monkeypatch.setattr(Recording, "generate", lambda self, requests: list(complete(self, requests))[:-2])
    with pytest.raises(EagleError, match="left 2 requests unanswered"):
        responses.make(stage(tmp_path, tiny_target))


@pytest.mark.parametrize(
    ("ids", "response", "beyond", "finish"),
    [
        ((5, 6, 2, 7, 8, 9, 9), (5, 6, 2), (7, 8), "stop"),
        ((2, 2, 2, 2, 2, 2, 2), (2,), (2, 2), "stop"),
        ((5, 6, 7, 8, 3, 9, 4), (5, 6, 7, 8, 3), (9, 4), "stop"),  # at the last allowed token; 3 stops as well
        ((5, 6, 7, 8, 9, 2, 4), (5, 6, 7, 8, 9), (2, 4), "length"),  # a stop beyond the limit is continuation
    ],
)
def test_at_stop(ids: tuple[int, ...], response: tuple[int, ...], beyond: tuple[int, ...], finish: str) -> None:
    completion = Completion("a", ids, "length", Timing(0, 1, 2))
    got, rest = responses.at_stop(completion, max_tokens=5, continuation=2, stop_ids=(2, 3))
    assert (got.token_ids, rest, got.finish) == (response, beyond, finish)
    with pytest.raises(EagleError, match="wrote 7 tokens where 8 were asked for"):
        responses.at_stop(completion, max_tokens=5, continuation=3, stop_ids=(2,))


def test_parts_are_flushed_by_count_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("eagle3x.data.response_parts.time", SimpleNamespace(monotonic=lambda: clock.now))
    parts = ResponseParts(tmp_path, rows_per_part=2)
    made = [Response(f"r{i}", "c", "train", (1, 2), (False, True), 1, 1, "stop") for i in range(5)]
    parts.add(made[0])
    assert parts.done_ids() == set()
    parts.add(made[1])
    assert parts.done_ids() == {"r0", "r1"}
    clock.now = 1000.0
    parts.add(made[2])
    assert parts.done_ids() == {"r0", "r1", "r2"}
    again = ResponseParts(tmp_path, rows_per_part=2)  # a second attempt numbers on
    again.add(made[4])
    again.add(made[3])
    again.merge({f"r{i}": i for i in range(5)})
    assert records.read_responses(tmp_path, "train") == made


def test_follow_ups_are_asked_after_the_targets_own_answers(
    tmp_path: Path, tiny_target: Target, engine: Recording
) -> None:
    tokenizer = tiny_target.tokenizer
    source = [
        Prompt("talk", "chat", "eval", (Message("user", "Hi"),), ("and?", "so?")),
        Prompt("long", "chat", "eval", (Message("user", "x" * 200),), ("and?",)),
        Prompt("teach", "chat", "train", (Message("user", "a"),), ("b",)),
        prompt("one", "train", "c"),
        prompt("choose", "val", "d"),
    ]
    run = stage(tmp_path, tiny_target, source=source)
    facts = responses.make(run)
    got = {r.id: r for r in records.read_responses(run.work)}
    # 200 + 19 tokens and 12 + 4 to write fit into 256 once; after a follow-up of 25 tokens no more
    assert sorted(got) == ["choose", "long", "one", "talk", "talk#2", "talk#3", "teach", "teach#2"]
    assert facts["too_long"] == 1
    assert engine.opened == 1
    assert facts["generated"]["requests"] == len(engine.requests) == 8

    def answer(id: str) -> str:
        r = got[id]
        ids = r.token_ids[r.prompt_tokens : r.prompt_tokens + r.response_tokens]
        return tokenizer.decode([t for t in ids if t not in (0, 1, 2)])

    def asked(*turns: str) -> tuple[int, ...]:
        return prompt_tokens(prompt("x", "eval", *turns), ChatTemplate(tokenizer, {}))

    for id, turns in {
        "talk": ["Hi"],
        "talk#2": ["Hi", answer("talk"), "and?"],
        "talk#3": ["Hi", answer("talk"), "and?", answer("talk#2"), "so?"],
        "teach#2": ["a", answer("teach"), "b"],
    }.items():
        r = got[id]
        assert r.token_ids[: r.prompt_tokens] == asked(*turns)
        assert (r.split, sum(r.loss_mask)) == ("train" if "teach" in id else "eval", r.response_tokens)
    order = [r.id for r in records.read_responses(run.work, "eval")]
    assert order == ["talk", "talk#2", "talk#3", "long"]


def test_a_conversation_that_was_killed_between_its_turns_goes_on(
    tmp_path: Path, tiny_target: Target, engine: Recording
) -> None:
    source = [
        Prompt("talk", "chat", "eval", (Message("user", "Hi"),), ("and?", "so?")),
        prompt("a", "train", "a"),
        prompt("d", "val", "d"),
    ]
    whole = stage(tmp_path / "whole", tiny_target, source=source)
    responses.make(whole)
    texts = records.read_responses(whole.work)
    resumed = stage(tmp_path / "resumed", tiny_target, source=source)
    parts = ResponseParts(resumed.work, rows_per_part=1)
    for r in texts:
        if r.id in ("a", "talk", "talk#2"):
            parts.add(r)
    engine.requests.clear()
    responses.make(resumed)
    assert sorted(r.id for r in engine.requests) == ["d", "talk#3"]
    assert records.read_responses(resumed.work) == texts


def test_a_sample_that_is_called_like_a_later_turn_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    source = [
        Prompt("talk", "chat", "eval", (Message("user", "Hi"),), ("and?",)),
        prompt("talk#2", "train", "a"),
        prompt("d", "val", "d"),
    ]
    with pytest.raises(EagleError, match="ids of two samples each: talk#2"):
        responses.make(stage(tmp_path, tiny_target, source=source))


if __name__ == "__main__":  # the process that is killed
    folder, path, kill_after = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    eagle3x.engines.adapter = Recording(kill_after)  # type: ignore[assignment]
    responses.make(stage(folder, resolve(TargetConfig(path.name, str(path), None, None, None, False, (1, 3, 4)))))
    print(json.dumps("not killed"))
