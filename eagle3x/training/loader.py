"""Packed steps, read ahead by processes and sent ahead to the device.

Readers write a step into a slot of a ring (`eagle3x.training.ring`) and tell where in it the tensors lie; what is left
to this process, whose interpreter trains, is one copy of a slot to the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eagle3x.training.packing import Empty, Packed
from eagle3x.training.ring import Piece, Ring, Slot
from eagle3x.types import EagleError


class Read(Protocol):
    """What travels to the readers: it is small, and can be pickled."""

    def __call__(self, step: Sequence[int], empty: Empty = ...) -> Packed:
        """Pack one step in memory that `empty` hands out."""
        ...


@dataclass(frozen=True)
class Filled:
    """A slot, how many of its bytes are used, and the step with pieces of it in place of tensors."""

    slot: int
    used: int
    step: Packed

    def on(self, memory: Tensor) -> Packed:
        """The step as views of a copy of the slot."""
        return self.step.map(lambda piece: cast(Piece, piece).of(memory))


@dataclass(frozen=True)
class Filling(Dataset[Filled | EagleError]):
    """What a reader does for a slot and a step. An error of ours is handed over: torch would add a traceback to it."""

    read: Read
    ring: Ring

    def __getitem__(self, task: tuple[int, Sequence[int]]) -> Filled | EagleError:  # type: ignore[override]
        number, step = task
        slot = Slot(self.ring.slot(number))
        try:
            packed = self.read(step, slot.empty)
        except EagleError as error:
            return error
        return Filled(number, slot.used, packed.map(slot.piece))


def loaded(
    steps: Sequence[Sequence[int]], read: Read, device: torch.device, workers: int, room: int
) -> Generator[Packed]:
    """Each of the steps on `device`, in order. The readers start at once, before the first step is asked for, and end
    when the generator is closed.

    workers: processes that read, each one step ahead; 0 reads here when a step is asked for. room: bytes that a step
    takes at most. EagleError if a reader dies, or as `read` raises.
    """
    if workers == 0 and device.type == "cpu":
        return (read(step) for step in steps)
    ring = Ring(workers + 2, room)
    options = {"prefetch_factor": 1, "multiprocessing_context": _processes()} if workers else {}
    tasks = [(number % ring.slots, step) for number, step in enumerate(steps)]
    generator = torch.Generator()  # torch would draw from the one that training draws from
    readers = iter(
        DataLoader(
            Filling(read, ring), batch_size=None, sampler=tasks, num_workers=workers, generator=generator, **options
        )
    )
    if device.type == "cpu":
        return (filled.on(ring.slot(filled.slot)[: filled.used].clone()) for filled in _received(readers))
    ring.pin()
    return _sent_ahead(_received(readers), ring, device)


def _processes() -> object:
    """Forked from a process that has imported what they need, and never from this one, which may hold a GPU."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _received(readers: Iterable[Filled | EagleError]) -> Iterator[Filled]:
    """What the readers hand over."""
    try:
        for filled in readers:
            if isinstance(filled, EagleError):
                raise filled
            yield filled
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise EagleError(
            f"a process that reads training steps died ({error}): if it was killed for want of memory, set"
            " train.num_workers lower"
        ) from error


def _sent_ahead(filled: Iterator[Filled], ring: Ring, device: torch.device) -> Generator[Packed]:
    """Each step is copied to the device while the one before it is computed."""
    copies = torch.cuda.Stream(device)
    on_their_way: deque[Arrival] = deque()
    while True:
        if len(on_their_way) == 2:  # asking for another step gives the older one's slot away
            on_their_way.popleft().copied.synchronize()
        here = next(filled, None)
        if here is None:
            break
        with torch.cuda.stream(copies):
            memory = ring.slot(here.slot)[: here.used].to(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(copies)
        on_their_way.append(Arrival(here, memory, copied))
        if len(on_their_way) == 2:
            yield on_their_way[0].awaited()
    if on_their_way:
        yield on_their_way[0].awaited()


@dataclass(frozen=True)
class Arrival:
    """A step that is being copied to the device's `memory`."""

    filled: Filled
    memory: Tensor
    copied: torch.cuda.Event

    def awaited(self) -> Packed:
        """The work to come waits for the copy, and the copy's memory for that work."""
        stream = torch.cuda.current_stream(self.memory.device)
        stream.wait_event(self.copied)
        self.memory.record_stream(stream)
        return self.filled.on(self.memory)
