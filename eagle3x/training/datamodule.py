"""Packed training steps, in segments that end where the drafter is validated or saved.

A Lightning epoch is one segment of the plan, so that the epoch number alone is the data position: what a killed run
had reached is exact wherever it continues.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from eagle3x.data.shards import Sample
from eagle3x.training.config import Train
from eagle3x.training.loader import loaded
from eagle3x.training.packing import Packed, plan
from eagle3x.training.reading import Reader


def evenly(total: int, parts: int) -> list[int]:
    """`parts` ends of equal shares of `total` steps, the last of which is `total`; fewer if steps are fewer."""
    return sorted({max(1, round(total * part / parts)) for part in range(1, parts + 1)})


@dataclass(frozen=True)
class Segment:
    """The next `length` of the steps that are being read ahead."""

    steps: Iterator[Packed]
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Packed]:
        return islice(self.steps, self.length)


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
        self.cfg, self.samples, self.lengths = cfg, samples, lengths
        self.plan = plan(lengths, cfg.tokens_per_step, cfg.epochs, seed)
        validations, checkpoints = evenly(len(self.plan), cfg.validations), evenly(len(self.plan), cfg.checkpoints)
        self.validation_steps = frozenset(validations)
        self.segment_ends = sorted({*validations, *checkpoints})
        self.labelled = [True] * len(samples)
        if teachable is not None:
            pairs = zip(samples, teachable, strict=True)
            self.labelled = [bool((sample.loss_mask[2:] & known[1:-1]).any()) for sample, known in pairs]
        self.teachable = None if teachable is None else torch.cat(list(teachable)).numpy()
        self._ahead: Generator[Packed] | None = None

    def reader(self, process: int = 0, processes: int = 1) -> Reader:
        """Reads a process' share of a step's samples."""
        return Reader(self.samples, self.lengths, self.cfg, self.teachable, self.labelled, process, processes)

    def train_dataloader(self) -> Segment:
        """The steps of the current epoch's segment. What comes after them is read meanwhile."""
        assert self.trainer is not None
        # Not `current_epoch`: a resumed trainer comes here before it has put that right.
        segment = self.trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        start = self.segment_ends[segment - 1] if segment else 0
        if self._ahead is None:
            reader, steps = self.reader(self.trainer.global_rank, self.trainer.world_size), self.plan[start:]
            device = self.trainer.strategy.root_device
            self._ahead = loaded(steps, reader, device, self.cfg.num_workers, reader.room(steps))
        return Segment(self._ahead, self.segment_ends[segment] - start)

    def teardown(self, stage: str) -> None:
        """The readers end."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def on_exception(self, exception: BaseException) -> None:
        """A trainer that fails does not tear down."""
        self.teardown("fit")

    def transfer_batch_to_device(self, batch: Packed, device: torch.device, dataloader_idx: int) -> Packed:
        """The loader has done it."""
        return batch
