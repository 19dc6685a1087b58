"""The drafter stage on a tiny target: exact resume, best-by-tau, facts, pretrained drafters passed on."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from eagle3x.data.shard_index import ShardSpec
from eagle3x.data.shards import Shards, ShardWriter, Subset
from eagle3x.diagnosis.replay import ReplaySample, replay
from eagle3x.drafters import checkpoint
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.config import Drafter
from eagle3x.drafters.losses import Teacher
from eagle3x.engines.config import Quantization
from eagle3x.targets import Target
from eagle3x.training import train
from eagle3x.training.config import Train
from eagle3x.training.datamodule import DraftData
from eagle3x.training.module import DraftModule
from eagle3x.training.validation import History
from eagle3x.types import EagleError, HiddenStates, Response, total

BOUNDARIES = (1, 3, 4)
DRAFTER = Drafter(
    source="custom", path=None, hub_id=None, revision=None, allow_bin=False, made_by=None, boundaries=None,
    init_from=None, init="warm_start", num_layers=1, intermediate_size=48, draft_vocab_size=40,
    norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip
TRAIN = Train(
    ttt_steps=2, loss="cross_entropy", step_weight_decay=0.5, tokens_per_step=64, epochs=3, learning_rate=2e-3,
    warmup_fraction=0.1, weight_decay=0.01, adam_betas=(0.9, 0.95), grad_clip=1.0, precision="fp32",
    out_of_vocab="renormalise", freeze_head=False, head_chunk=16, validations=2, checkpoints=5, num_workers=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def states(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy text of the tiny target with its states: 12 train samples, 4 val samples."""
    root = tmp_path_factory.mktemp("states")
    model = LlamaForCausalLM.from_pretrained(tiny_target.path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("val", 4)):
        spec = ShardSpec(BOUNDARIES, tiny_target.hidden_size, "float32", "post_norm")
        with ShardWriter(root / split, spec, 1000) as writer:
            for number in range(count):
                ids = torch.randint(3, 128, (1, 5 + number % 3), generator=generator)
                prompt = ids.shape[1]
                with torch.no_grad():
                    for _ in range(18):
                        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
                    hidden = model(ids, output_hidden_states=True).hidden_states
                assert hidden is not None
                tokens, length = tuple(ids[0].tolist()), ids.shape[1]
                mask = tuple(prompt <= i < length - 4 for i in range(length))
                response = Response(
                    f"{split}-{number}",
                    "ab"[number % 2],
                    split,
                    tokens,
                    mask,
                    prompt,
                    14,
                    "length",  # type: ignore[arg-type]
                )
                aux = torch.cat([hidden[b][0] for b in BOUNDARIES], dim=-1)
                writer.add(HiddenStates(response.id, tokens, aux, hidden[-1][0], "post_norm"), response)
    return root


@pytest.fixture
def stage(tiny_target: Target, states: Path, tmp_path: Path) -> Callable[..., Any]:
    """A StageRun of the drafter stage, in a directory of its own."""

    def stage_run(name: str, drafter: Drafter = DRAFTER, training: Train = TRAIN) -> Any:
        work = tmp_path / name
        work.mkdir(exist_ok=True)
        hardware = SimpleNamespace(device="cpu", threads=None, devices=None)
        cfg = SimpleNamespace(drafter=drafter, train=training, seed=1, hardware=hardware)
        inputs = {"hidden_states": SimpleNamespace(path=states)} if drafter.source == "custom" else {}
        extract = SimpleNamespace(quantization=Quantization(scheme="none"))
        slots = {"extract": extract}
        return SimpleNamespace(cfg=cfg, work=work, target=tiny_target, inputs=inputs, slot=slots.__getitem__)

    return stage_run


class Kill(Callback):
    """Ends training before a step, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_steps_it_ends_bit_for_bit_the_same(
    stage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    whole = stage("whole")
    facts = train.make(whole)
    steps = facts["steps"]
    assert steps == 18  # 12 samples of 23 to 25 tokens: 2 a step of 64 tokens, 6 steps an epoch, 3 epochs
    run = stage("killed")
    trainer = train.lightning_trainer
    kills = sorted(random.Random(seed).sample(range(steps), 3))
    for step in kills:
        monkeypatch.setattr(train, "lightning_trainer", lambda r, d, c, s=step: trainer(r, d, [*c, Kill(s)]))
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train.make(run)
    monkeypatch.setattr(train, "lightning_trainer", trainer)
    resumed = train.make(run)
    a, b = (load_file(r.work / "checkpoint/model.safetensors") for r in (whole, run))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
    ours, theirs = ([json.loads(line) for line in (r.work / "metrics.jsonl").open()] for r in (whole, run))
    for record in (*ours, *theirs):
        record.pop("seconds", None)
    assert ours == theirs
    assert {**facts, "tokens_per_second": 0} == {**resumed, "tokens_per_second": 0}


def test_an_attempt_whose_segments_were_others_is_not_gone_on_with(
    stage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is in the data is counted in segments: it would repeat steps, or end early."""
    trainer = train.lightning_trainer
    monkeypatch.setattr(train, "lightning_trainer", lambda r, d, c: trainer(r, d, [*c, Kill(10)]))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train.make(stage("moved"))
    monkeypatch.setattr(train, "lightning_trainer", trainer)
    for checkpoints in (TRAIN.checkpoints * 3, 1):
        with pytest.raises(EagleError, match=r"set train\.checkpoints to what it was"):
            train.make(stage("moved", training=replace(TRAIN, checkpoints=checkpoints)))


@pytest.mark.parametrize(
    ("device", "head_size", "said"), [("cpu", 64, "hardware=cuda"), ("cuda", 96, "16, 32, 64, 128")]
)
def test_what_bf16_cannot_do_is_known_beforehand(device: str, head_size: int, said: str) -> None:
    (reason,) = replace(TRAIN, precision="bf16").refusals(device, head_size)
    assert said in reason
    assert TRAIN.refusals(device, head_size) == []
    assert replace(TRAIN, precision="bf16").refusals("cuda", 128) == []


def test_facts_are_those_of_the_data_and_the_best_drafter_is_what_is_published(
    stage: Callable[..., Any], states: Path, tiny_target: Target
) -> None:
    run = stage("facts")
    facts = train.make(run)
    samples, val = list(Shards(states / "train")), list(Shards(states / "val"))
    tokens = sum(len(s.token_ids) for s in samples)
    assert facts["tokens"] == 3 * tokens
    # 14 labels a sample. Step 0 says all of them, step 1 all but those whose row would lie before the first token:
    # a prompt has 5 tokens or more, so none.
    assert facts["kept_rows"] == 3 * 2 * 14 * 12
    assert facts["label_rows"] == 14 * 12
    assert (facts["samples"], facts["samples_without_label"], facts["val_prompts"]) == (12, 0, 4)
    drafter = checkpoint.load(run.work / "checkpoint", tiny_target)
    known = set(drafter.target_ids().tolist())
    assert len(known) == 40
    assert set(tiny_target.eos_token_ids) <= known
    written = [t for s in samples for t in s.token_ids[s.loss_mask].tolist()]
    assert facts["coverage"]["train"] == pytest.approx(sum(t in known for t in written) / len(written))
    # The text is greedy, so a label's argmax is the next token.
    assert facts["out_of_vocab_rows"] == sum(t not in known for t in written)
    trained = sum(p.numel() for p in drafter.parameters()) - drafter.embed_tokens.weight.numel()
    assert facts["trainable_parameters"] == trained
    with torch.no_grad():
        again = total(
            replay(
                drafter, [ReplaySample(s.id, s.token_ids, s.aux, s.prompt_tokens, s.response_tokens) for s in val], 2
            )
        )
    assert facts["val_tau"] == pytest.approx(1 + again.accepted / again.verify_steps)
    records = [json.loads(line) for line in (run.work / "metrics.jsonl").open()]
    taus = {r["step"]: r["val"]["tau"] for r in records if "val" in r}
    assert sorted(taus) == [0, 9, 18]
    assert facts["val_tau"] == max(taus.values())
    assert taus[facts["best_step"]] == facts["val_tau"]
    assert [r["step"] for r in records if "val" not in r] == list(range(1, 19))
    assert sorted(p.name for p in run.work.iterdir()) == ["checkpoint", "metrics.jsonl"]


def test_masked_rows_leave_the_loss_and_are_counted_the_same(stage: Callable[..., Any]) -> None:
    small = replace(DRAFTER, draft_vocab_size=12)
    kept = train.make(stage("renormalise", small, replace(TRAIN, epochs=1)))
    masked = train.make(stage("mask", small, replace(TRAIN, epochs=1, out_of_vocab="mask")))
    assert kept["out_of_vocab_rows"] == masked["out_of_vocab_rows"] > 0
    assert kept["kept_rows"] - masked["kept_rows"] == 2 * masked["out_of_vocab_rows"]


def test_training_lowers_the_loss(stage: Callable[..., Any]) -> None:
    run = stage("learns", replace(DRAFTER, init="random"), replace(TRAIN, epochs=12, learning_rate=1e-2))
    train.make(run)
    losses = [r["loss"][0] for r in map(json.loads, (run.work / "metrics.jsonl").open()) if "loss" in r]
    assert losses[0] == pytest.approx(math.log(40), abs=0.05)  # it knows nothing of 40 tokens
    assert sum(losses[-6:]) / 6 < math.log(40) - 0.3


def test_a_pretrained_drafter_is_checked_and_passed_on(stage: Callable[..., Any], tmp_path: Path) -> None:
    source = stage("source", training=replace(TRAIN, epochs=1))
    train.make(source)
    path = source.work / "checkpoint"
    pretrained = replace(DRAFTER, source="pretrained", path=str(path), init="random", boundaries=(1, 3, 4))
    run = stage("passed", pretrained)
    assert train.make(run) == {
        "source": "pretrained", "format": "LlamaForCausalLMEagle3", "draft_vocab_size": 40,
        "ignored_keys": ["torch_dtype"], "boundaries": [1, 3, 4], "boundaries_said_by": "drafter.boundaries",
        "embedding_likeness": pytest.approx(1),
    }  # fmt: skip
    a, b = load_file(path / "model.safetensors"), load_file(run.work / "checkpoint/model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    (path / "config.json").write_text("{}")
    with pytest.raises(EagleError, match="drafter config lacks hidden_size"):
        train.make(stage("broken", pretrained))


def test_training_goes_on_from_a_published_drafter(stage: Callable[..., Any], tiny_target: Target) -> None:
    """Its architecture, vocabulary, weights and embedding are where it starts, and its config needs no more steps."""
    published = Path(__file__).parent.parent / "fixtures/drafters/specforge-yarn"
    run = stage("tuned", replace(DRAFTER, init_from=str(published), made_by="specforge"), replace(TRAIN, epochs=2))
    facts = train.make(run)
    assert (facts["source"], facts["boundaries"], facts["steps"]) == ("custom", [1, 3, 4], 12)
    before = checkpoint.load(published, tiny_target)
    after = checkpoint.load(run.work / "checkpoint", tiny_target)
    assert after.arch == before.arch
    assert torch.equal(after.d2t, before.d2t)
    assert torch.equal(after.embed_tokens.weight, before.embed_tokens.weight)
    assert not torch.equal(after.embed_tokens.weight, tiny_target.embedding())
    records = [json.loads(line) for line in (run.work / "metrics.jsonl").open()]
    losses = [record["loss"][0] for record in records if "loss" in record]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_bf16_on_a_cpu_is_refused(stage: Callable[..., Any]) -> None:
    with pytest.raises(EagleError, match="precision=bf16 needs hardware=cuda"):
        train.make(stage("bf16", training=replace(TRAIN, precision="bf16")))


def fitted(run: Any, training: Train, documents: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights and records after the last step on the first so many documents, from random weights."""
    shards = Shards(run.inputs["hidden_states"].path / "train")
    samples, target = Subset(shards, range(documents)), run.target
    drafter = train.initial_drafter(
        replace(DRAFTER, init="random"), target, shards, samples, 1, torch.device("cpu"), start=False
    )
    teacher = Teacher(target.head()[drafter.target_ids()], target.final_norm(), target.rms_norm_eps, "post_norm")
    data = DraftData(samples, [len(s.token_ids) for s in samples], training, 1, None)
    history = History(run.work / "metrics.jsonl")
    module = DraftModule(drafter, teacher, training, data.segment_ends, 1.0, history)
    train.lightning_trainer(run, data, []).fit(module, datamodule=data)
    return dict(drafter.state_dict()), history.records()


def test_two_processes_train_the_same_drafter(stage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two documents, one for each process, and a last one of a single document, which both read.

    Each process has a reader of its own.
    """
    training = replace(TRAIN, epochs=1, checkpoints=1)
    alone, ours = fitted(stage("one"), training, 5)
    monkeypatch.setattr(train, "devices_of", lambda hardware: [torch.device("cpu")] * 2)
    together, theirs = fitted(stage("two"), replace(training, num_workers=1), 5)
    assert len(theirs) == 3
    assert theirs[-1]["tokens"] == 23 + 24 + 25 + 23 + 24
    for mine, other in zip(ours, theirs, strict=True):
        assert all(mine[key] == other[key] for key in ("step", "tokens", "asked", "rows", "learning_rate"))
        assert other["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        assert other["accuracy"] == pytest.approx(mine["accuracy"], abs=1e-6)
    for name, tensor in alone.items():  # Adam's steps are 2e-3 each, whatever the gradient: 1 % of one is agreement
        torch.testing.assert_close(together[name], tensor, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_reading_ahead_by_processes_trains_the_same_drafter(stage: Callable[..., Any]) -> None:
    """Over three segments, of which one stream of steps is read."""
    training = replace(TRAIN, epochs=1, checkpoints=3)
    here, ours = fitted(stage("here"), training, 9)
    ahead, theirs = fitted(stage("ahead"), replace(training, num_workers=2), 9)
    assert len(ours) == 5
    assert [{**r, "seconds": 0} for r in ours] == [{**r, "seconds": 0} for r in theirs]
    assert all(torch.equal(tensor, ahead[name]) for name, tensor in here.items())


def test_a_frozen_head_stays_and_the_rest_learns(stage: Callable[..., Any]) -> None:
    run, training = stage("frozen"), replace(TRAIN, epochs=1, checkpoints=1)
    free, _ = fitted(run, training, 4)
    frozen, _ = fitted(run, replace(training, freeze_head=True), 4)
    changed = {name for name, tensor in free.items() if not torch.equal(tensor, frozen[name])}
    assert {"lm_head.weight", "norm.weight", "fc.weight"} <= changed
    assert bool((frozen["norm.weight"] == 1).all())


def test_counted_flops_by_hand() -> None:
    arch = Architecture(
        hidden_size=2, intermediate_size=5, num_heads=2, num_kv_heads=1, head_dim=3, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=8, vocab_size=9, draft_vocab_size=7, target_hidden_size=4, num_aux=3,
        norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
    )  # fmt: skip
    # fc 12x2 = 24; k and v 4x3 each = 24; q 4x6 = 24, o 6x2 = 12, MLP 3x2x5 = 30; head 2x7 = 14.
    # Of every token 24 + 24, of a row in the loss 2 steps (66 + 14) + 24 for the second step's own key; teacher 14.
    assert train.flops_per_token(arch, TRAIN, 0.5) == 2 * (3 * (48 + 0.5 * (160 + 24)) + 0.5 * 14)
    frozen = replace(TRAIN, freeze_head=True)  # no gradient of the head's matrix: 2 steps of 2 * 7 multiply-adds a row
    assert train.flops_per_token(arch, TRAIN, 0.5) - train.flops_per_token(arch, frozen, 0.5) == 2 * 0.5 * 2 * 2 * 7
