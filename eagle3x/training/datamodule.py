"""Packed training steps, in segments that end where the drafter is validated or saved.

A Lightning epoch is one segment of the plan, so that the epoch number alone is the data position: what a killed run
had reached is exact wherever it continues.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from eagle3x.data.shards import Sample
from eagle3x.training.config import Train
from eagle3x.training.loader import Loader
from eagle3x.training.packing import Packed, Size, kept, pack, plan, shares


def evenly(total: int, parts: int) -> list[int]:
    """`parts` ends of equal shares of `total` steps, the last of which is `total`; fewer if steps are fewer."""
    return sorted({max(1, round(total * part / parts)) for part in range(1, parts + 1)})


class DraftData(LightningDataModule):
    """The train split as a plan of steps.

    samples: documents of the train split that have a row in the loss. teachable: see `kept`.

    With several processes each reads a share of every step, so that their number changes no step.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        lengths: Sequence[int],
        cfg: Train,
        seed: int,
        teachable: Sequence[Tensor] | None,
    ) -> None:
        super().__init__()
        self.cfg, self.samples, self.teachable = cfg, samples, teachable
        self.plan = plan(lengths, cfg.tokens_per_step, cfg.epochs, seed)
        validations, checkpoints = evenly(len(self.plan), cfg.validations), evenly(len(self.plan), cfg.checkpoints)
        self.validation_steps = frozenset(validations)
        self.segment_ends = sorted({*validations, *checkpoints})

    def train_dataloader(self) -> Loader:
        """The steps of the current epoch's segment."""
        assert self.trainer is not None
        segment = self.trainer.current_epoch
        start = self.segment_ends[segment - 1] if segment else 0
        steps = self.plan[start : self.segment_ends[segment]]
        device, rank, processes = (
            self.trainer.strategy.root_device,
            self.trainer.global_rank,
            self.trainer.world_size,
        )
        return Loader(steps, lambda step: self.read(step, device, rank, processes), device, self.cfg.num_workers)

    def read(self, step: Sequence[int], device: torch.device, process: int = 0, processes: int = 1) -> Packed:
        """A process' share of one step's samples, packed on the CPU, ready to be sent to the device.

        Where not everybody would have a row in the loss, everybody reads all.
        """
        cfg, samples = self.cfg, [self.samples[i] for i in step]
        known = [None if self.teachable is None else [self.teachable[i]] for i in step]
        keeps = [kept([sample], cfg.ttt_steps, mask) for sample, mask in zip(samples, known, strict=True)]
        size, times, mine = Size.of(torch.cat(keeps, dim=1)), 1, list(range(len(step)))
        if processes > 1:
            dealt = shares([len(sample.token_ids) for sample in samples], processes)
            if all(any(bool(keeps[i].any()) for i in part) for part in dealt):
                times, mine = processes, dealt[process]
        keep = torch.cat([keeps[i] for i in mine], dim=1)
        pinned = device.type == "cuda"
        return pack([samples[i] for i in mine], keep, cfg.step_weights, cfg.head_chunk, pinned, size, times)

    def transfer_batch_to_device(self, batch: Packed, device: torch.device, dataloader_idx: int) -> Packed:
        """The loader has done it."""
        return batch
