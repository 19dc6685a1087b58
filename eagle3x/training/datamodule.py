"""Packed training steps, in segments that end where the drafter is validated or saved.

A Lightning epoch is one segment of the plan, so that the epoch number alone is the data position: what a killed run
had reached is exact wherever it continues.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eagle3x.data.shards import Sample
from eagle3x.training.config import Train
from eagle3x.training.packing import Packed, pack, plan


class Steps(Dataset[Packed]):
    """The packed batch of each step."""

    def __init__(
        self,
        samples: Sequence[Sample],
        steps: Sequence[Sequence[int]],
        ttt_steps: int,
        teachable: Sequence[Tensor] | None,
    ) -> None:
        self.samples, self.steps, self.ttt_steps, self.teachable = samples, steps, ttt_steps, teachable

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Packed:
        chosen = self.steps[index]
        teachable = None if self.teachable is None else [self.teachable[i] for i in chosen]
        return pack([self.samples[i] for i in chosen], self.ttt_steps, teachable)


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

    def train_dataloader(self) -> DataLoader[Packed]:
        """The steps of the current epoch's segment."""
        assert self.trainer is not None
        segment = self.trainer.current_epoch
        start = self.segment_ends[segment - 1] if segment else 0
        steps = self.plan[start : self.segment_ends[segment]]
        dataset = Steps(self.samples, steps, self.cfg.ttt_steps, self.teachable)
        return DataLoader(dataset, batch_size=None, num_workers=self.cfg.num_workers)

    def transfer_batch_to_device(self, batch: Packed, device: torch.device, dataloader_idx: int) -> Packed:
        """Lightning cannot move a record that it does not know."""
        return batch.to(device)
