"""Validation by replay: what an engine would accept on the val split's greedy text, and the best drafter so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file, save_file

from eagle3x.benchmark.metrics import Acceptance, acceptance, by_category
from eagle3x.data.shards import Sample
from eagle3x.diagnosis.replay import ReplaySample, replay
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.types import EagleError, SpecCounters


class History:
    """metrics.jsonl: one record a training step (`step`, `loss`, ...) or validation (`step`, `val`)."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, *records: dict[str, Any]) -> None:
        """Add records."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in records)

    def truncate(self, step: int) -> None:
        """Forget what lies after `step`: a resumed run does it again."""
        kept = [record for record in self.records() if record["step"] <= step]
        new = self.file.with_suffix(".new")
        new.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        new.replace(self.file)

    def records(self) -> list[dict[str, Any]]:
        """All records but a last line that a kill cut short."""
        if not self.file.is_file():
            return []
        lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def replayed(
    drafter: Eagle3, samples: Sequence[Sample], num_speculative_tokens: int, process: int = 0, processes: int = 1
) -> list[SpecCounters]:
    """Counters of each sample of the val split, which the processes divide among them."""
    drafter.eval()
    mine = (samples[i] for i in range(process, len(samples), processes))
    with torch.no_grad():
        counters = replay(
            drafter,
            (ReplaySample(s.id, s.token_ids, s.aux, s.prompt_tokens, s.response_tokens) for s in mine),
            num_speculative_tokens,
        )
    if processes == 1:
        return counters
    parts: list[Any] = [None] * processes
    torch.distributed.all_gather_object(parts, counters)
    return [parts[i % processes][i // processes] for i in range(len(samples))]


def figures(counters: Sequence[SpecCounters], categories: Sequence[str]) -> dict[str, Any]:
    """tau and survival by position, over all and by category."""

    def of(a: Acceptance) -> dict[str, Any]:
        return {"tau": a.tau, "survival": list(a.survival)}

    named = by_category(counters, categories)
    return {**of(acceptance(counters)), "categories": {name: of(a) for name, a in named.items()}}


class Validation(Callback):
    """At the steps asked for: replay the val split, write the figures, keep the best drafter by tau.

    What is kept is the drafter without its embedding, in `best`, written whole or not at all.
    """

    def __init__(
        self, samples: Sequence[Sample], steps: frozenset[int], best: Path, history: History, k: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.samples, self.steps, self.best, self.history, self.k, self.say = samples, steps, best, history, k, say
        self.best_tau, self.best_step = 0.0, -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The untrained drafter is a candidate too."""
        if trainer.global_step == 0:
            self._validate(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A segment has ended."""
        if trainer.global_step in self.steps:
            self._validate(trainer, pl_module)

    def _validate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        drafter = pl_module.drafter
        assert isinstance(drafter, Eagle3)
        counters = replayed(drafter, self.samples, self.k, trainer.global_rank, trainer.world_size)
        values = figures(counters, [s.category for s in self.samples])
        drafter.train()
        better = values["tau"] > self.best_tau
        if better:
            self.best_tau, self.best_step = values["tau"], trainer.global_step
        if not trainer.is_global_zero:
            return
        self.history.append({"step": trainer.global_step, "val": values})
        self.say(f"step {trainer.global_step}: tau {values['tau']:.3f} on {len(self.samples)} val prompts")
        if better:
            save_trained(drafter, self.best)

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoint."""
        return {"best_tau": self.best_tau, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From Lightning's checkpoint."""
        self.best_tau, self.best_step = state_dict["best_tau"], state_dict["best_step"]


def save_trained(drafter: Eagle3, file: Path) -> None:
    """All weights but the frozen embedding."""
    new = file.with_suffix(".new")
    trained = {name: p.detach().cpu().contiguous() for name, p in drafter.named_parameters() if p.requires_grad}
    save_file(trained, new)
    new.replace(file)


def load_trained(drafter: Eagle3, file: Path) -> None:
    """What `save_trained` wrote in this run, into the same drafter. EagleError if it is another one's."""
    trained = load_file(file)
    if trained.keys() != {name for name, p in drafter.named_parameters() if p.requires_grad}:
        raise EagleError(f"{file} holds the weights of another drafter")
    drafter.load_state_dict(trained, strict=False)
