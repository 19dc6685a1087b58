"""Steps that other processes read are those that this one reads, in the plan's order; and what a reader's end says."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3x.data.shard_index import ShardSpec
from eagle3x.data.shards import Shards, ShardWriter
from eagle3x.training.config import Train
from eagle3x.training.loader import loaded
from eagle3x.training.packing import Empty, Packed, kept, pack, room
from eagle3x.training.reading import Reader
from eagle3x.training.ring import Ring, Slot
from eagle3x.types import EagleError, HiddenStates, Response

TRAIN = Train(
    ttt_steps=3, loss="cross_entropy", step_weight_decay=0.5, tokens_per_step=64, epochs=1, learning_rate=1e-3,
    warmup_fraction=0.1, weight_decay=0.0, adam_betas=(0.9, 0.95), grad_clip=1.0, precision="fp32",
    out_of_vocab="mask", freeze_head=False, head_chunk=16, validations=1, checkpoints=1, num_workers=2,
)  # fmt: skip
LENGTHS = [7, 12, 9, 20, 5, 16]
STEPS = [[0, 1], [2], [3, 4], [5, 0, 2], [1], [4, 5], [3]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Documents in two shards, of random states and masks; every fourth position may not teach."""
    folder, random = tmp_path_factory.mktemp("loader"), torch.Generator().manual_seed(0)
    with ShardWriter(folder, ShardSpec((1, 2, 3), 8, "bfloat16", "post_norm"), 40) as writer:
        for number, length in enumerate(LENGTHS):
            ids = tuple(torch.randint(0, 99, (length,), generator=random).tolist())
            states = torch.randn(length, 32, generator=random).bfloat16()
            aux, last = states[:, :24].contiguous(), states[:, 24:].contiguous()
            mask = tuple(i >= 2 for i in range(length))
            response = Response(str(number), "a", "train", ids, mask, 2, length - 2, "length")
            writer.add(HiddenStates(str(number), ids, aux, last, "post_norm"), response)
    teachable = np.arange(sum(LENGTHS)) % 4 != 0
    return Reader(Shards(folder), LENGTHS, TRAIN, teachable, [True] * len(LENGTHS))


def tensors(packed: Packed) -> list[Tensor]:
    """All of a step's."""
    found: list[Tensor] = []
    packed.map(found.append)
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_read_the_same_steps_in_the_same_order(reader: Reader, processes: int) -> None:
    """Seven steps in four slots: a step that is kept is not written over."""
    reader = replace(reader, process=processes - 1, processes=processes)
    here = list(loaded(STEPS, reader, CPU, 0, reader.room(STEPS)))
    there = list(loaded(STEPS, reader, CPU, 2, reader.room(STEPS)))
    assert len(here) == len(there) == len(STEPS)
    for ours, theirs in zip(here, there, strict=True):
        assert (ours.step, ours.times, ours.pairs.chunks) == (theirs.step, theirs.times, theirs.pairs.chunks)
        assert ours.layout.longest == theirs.layout.longest
        assert len(tensors(ours)) == 13
        for mine, other in zip(tensors(ours), tensors(theirs), strict=True):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)


@dataclass(frozen=True)
class Failing:
    """Reads a step of the sample 2 by dying, and one of the sample 3 by an error of ours."""

    reader: Reader

    def __call__(self, step: Sequence[int], empty: Empty = torch.empty) -> Packed:
        if step == [2]:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == [3]:
            raise EagleError("shard-00001 is not what its index says")
        return self.reader(step, empty)


def test_a_reader_that_ends_early_is_an_error_that_says_so(reader: Reader) -> None:
    dying = loaded([[0], [2], [4]], Failing(reader), CPU, 1, reader.room(STEPS))
    next(dying)
    with pytest.raises(EagleError, match=r"reads training steps died .*pid.* set train\.num_workers lower"):
        next(dying)
    failing = loaded([[0], [3], [4]], Failing(reader), CPU, 1, reader.room(STEPS))
    next(failing)
    with pytest.raises(EagleError, match=r"^shard-00001 is not what its index says$"):
        next(failing)


def test_the_room_counted_for_a_step_is_what_it_takes_where_every_row_is_kept(reader: Reader) -> None:
    documents = [replace(s, loss_mask=torch.ones_like(s.loss_mask)) for s in (reader.samples[3], reader.samples[5])]
    needed = room(documents[0], 36, 2, 3)
    slot = Slot(Ring(1, needed).slot(0))
    packed = pack(documents, kept(documents, 3), TRAIN.step_weights, 16, slot.empty)
    taken = sum(x.numel() * x.element_size() for x in tensors(packed))
    assert taken <= needed < 1.2 * taken
    with pytest.raises(EagleError, match="a step needs more than the"):
        Slot(slot.memory[: slot.used // 2]).empty((slot.used,), dtype=torch.uint8)
