"""The drafter stage on a tiny target: exact resume, best-by-tau, facts, pretrained drafters passed on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from eagle3x.data.shard_index import ShardSpec
from eagle3x.data.shards import ShardWriter
from eagle3x.drafters.config import Drafter
from eagle3x.targets import Target
from eagle3x.training import train
from eagle3x.training.config import Train
from eagle3x.types import HiddenStates, Response

BOUNDARIES = (1, 3, 4)
DRAFTER = Drafter(
    source="custom", path=None, hub_id=None, revision=None, init="warm_start", num_layers=1, intermediate_size=48,
    draft_vocab_size=40, norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip
TRAIN = Train(
    ttt_steps=2, step_weight_decay=0.5, tokens_per_step=64, epochs=3, learning_rate=2e-3, warmup_fraction=0.1,
    weight_decay=0.01, adam_betas=(0.9, 0.95), grad_clip=1.0, precision="fp32", out_of_vocab="renormalise",
    head_chunk=16, validations=2, checkpoints=5, num_workers=0,
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
        return SimpleNamespace(cfg=cfg, work=work, target=tiny_target, inputs=inputs)

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
    trainer = train._trainer
    kills = sorted(random.Random(seed).sample(range(steps), 3))
    for step in kills:
        monkeypatch.setattr(train, "_trainer", lambda r, d, c, s=step: trainer(r, d, [*c, Kill(s)]))
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train.make(run)
    monkeypatch.setattr(train, "_trainer", trainer)
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
