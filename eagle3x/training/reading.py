"""What a process reads of a training step. Processes that read are given it: only indices and one array travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3x.data.shards import Sample
from eagle3x.training.config import Train
from eagle3x.training.packing import Empty, Packed, Size, kept, pack, room, shares


@dataclass(frozen=True)
class Reader:
    """One process' share of steps over `samples`.

    lengths: of all samples. teachable: of all of them one after another, see `kept` (an array: torch would share a
    tensor through /dev/shm). labelled: which samples have a row in the loss.
    """

    samples: Sequence[Sample]
    lengths: Sequence[int]
    cfg: Train
    teachable: NDArray[np.bool_] | None
    labelled: Sequence[bool]
    process: int = 0
    processes: int = 1

    def __call__(self, step: Sequence[int], empty: Empty = torch.empty) -> Packed:
        """A share of one step's samples, packed on the CPU in memory that `empty` hands out."""
        cfg, samples = self.cfg, {i: self.samples[i] for i in step}
        keeps = {i: kept([samples[i]], cfg.ttt_steps, self._teachable(i)) for i in step}
        size = Size.of(torch.cat([keeps[i] for i in step], dim=1))
        mine, times = self.share(step)
        keep = torch.cat([keeps[i] for i in mine], dim=1)
        return pack([samples[i] for i in mine], keep, cfg.step_weights, cfg.head_chunk, empty, size, times)

    def share(self, step: Sequence[int]) -> tuple[list[int], int]:
        """Which of a step's samples are read here, and what their loss is multiplied by (see `Packed.times`).

        Where not everybody would have a row in the loss, everybody reads all.
        """
        if self.processes > 1:
            dealt = [[step[i] for i in part] for part in shares([self.lengths[i] for i in step], self.processes)]
            if all(any(self.labelled[i] for i in part) for part in dealt):
                return dealt[self.process], self.processes
        return list(step), 1

    def room(self, steps: Sequence[Sequence[int]]) -> int:
        """Bytes that the largest of the steps takes here at most."""
        mine = [self.share(step)[0] for step in steps]
        tokens, documents = max(sum(self.lengths[i] for i in part) for part in mine), max(map(len, mine))
        return room(self.samples[0], tokens, documents, self.cfg.ttt_steps)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    def _teachable(self, index: int) -> list[Tensor] | None:
        if self.teachable is None:
            return None
        return [torch.from_numpy(self.teachable[self._starts[index] : self._starts[index + 1]])]
