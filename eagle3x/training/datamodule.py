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
from eagle3x.training.packing import Packed, pack, plan


def evenly(total: int, parts: int) -> list[int]:
    """`parts` ends of equal shares of `total` steps, the last of which is `total`; fewer if steps are fewer."""
    return sorted({max(1, round(total * part / parts)) for part in range(1, parts + 1)})


class DraftData(LightningDataModule):
    """The train split as a plan of steps.

    samples: documents of the train split that have a row in the loss. teachable: see `pack`.
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
        self.tokens_at = torch.tensor([sum(lengths[i] for i in step) for step in self.plan]).cumsum(0).tolist()
        validations, checkpoints = evenly(len(self.plan), cfg.validations), evenly(len(self.plan), cfg.checkpoints)
        self.validation_steps = frozenset(validations)
        self.segment_ends = sorted({*validations, *checkpoints})

    def train_dataloader(self) -> Loader:
        """The steps of the current epoch's segment."""
        assert self.trainer is not None
        segment = self.trainer.current_epoch
        start = self.segment_ends[segment - 1] if segment else 0
        steps = self.plan[start : self.segment_ends[segment]]
        device = self.trainer.strategy.root_device
        return Loader(steps, lambda step: self.read(step, device), device, self.cfg.num_workers)

    def read(self, step: Sequence[int], device: torch.device) -> Packed:
        """One step's samples, packed on the CPU, ready to be sent to the device."""
        teachable = None if self.teachable is None else [self.teachable[i] for i in step]
        samples = [self.samples[i] for i in step]
        return pack(samples, self.cfg.step_weights, self.cfg.head_chunk, teachable, pinned=device.type == "cuda")

    def transfer_batch_to_device(self, batch: Packed, device: torch.device, dataloader_idx: int) -> Packed:
        """The loader has done it."""
        return batch
