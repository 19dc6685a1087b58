"""Memory that processes share, in which packed steps travel from who reads them to who sends them to a device.

A step is written once, to where the GPU reads it by itself. In an anonymous file (`memfd_create`) rather than in
/dev/shm, which containers keep at 64 MiB.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, cast

import torch
from torch import Tensor

from eagle3x.types import EagleError

ALIGNMENT = 256
"""Bytes; no dtype and no copy engine wants more."""
TENSORS = 16
"""That a slot holds at most: each may leave a gap before it."""


@dataclass(frozen=True)
class Piece:
    """Where a tensor lies in its slot, in bytes, and what it is."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Exclusive."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """A view of a slot's bytes, or of a copy's."""
        return memory[self.start : self.end].view(self.dtype).view(self.shape)


class Slot:
    """One step's memory [bytes], handed out from its beginning."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.used = memory, 0

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """As `torch.empty`. EagleError if there is no room."""
        piece = Piece(-(-self.used // ALIGNMENT) * ALIGNMENT, dtype, shape)
        if piece.end > len(self.memory):
            raise EagleError(f"a step needs more than the {len(self.memory)} bytes that were counted for it")
        self.used = piece.end
        return piece.of(self.memory)

    def piece(self, x: Tensor) -> Piece:
        """Where a tensor lies that `empty` has made."""
        return Piece(x.data_ptr() - self.memory.data_ptr(), x.dtype, tuple(x.shape))


class Ring:
    """`slots` slots for `size` bytes of tensors, the same memory in every process that is started with it."""

    def __init__(self, slots: int, size: int) -> None:
        self.slots, self.size = slots, (-(-size // ALIGNMENT) + TENSORS) * ALIGNMENT
        self._file = os.memfd_create("eagle3x-steps")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, self.slots * self.size)
        self._map(mmap.MAP_SHARED)

    def _map(self, flags: int) -> None:
        mapped = mmap.mmap(self._file, self.slots * self.size, flags)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8).view(self.slots, self.size)

    def slot(self, number: int) -> Tensor:
        """Its bytes [size]."""
        return self._memory[number]

    def pin(self) -> None:
        """Let the GPUs read it by themselves. EagleError if there is not enough memory that may be pinned."""
        address, cuda = self._memory.data_ptr(), cast(Any, torch.cuda.cudart())
        failed = int(cuda.cudaHostRegister(address, self._memory.numel(), 0))
        if failed:
            size = f"{self._memory.numel() / 2**30:.1f} GiB"
            raise EagleError(
                f"cannot pin {size} of memory for steps that are read ahead (CUDA error {failed}): set"
                " train.num_workers lower"
            )
        weakref.finalize(self, cuda.cudaHostUnregister, address)  # before it is unmapped: this holds no reference

    def __getstate__(self) -> dict[str, Any]:
        return {"slots": self.slots, "size": self.size, "_file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.slots, self.size, self._file = state["slots"], state["size"], state["_file"].detach()
        weakref.finalize(self, os.close, self._file)
        # At once: page by page, as they are written to, costs a reader four times as long as what it writes.
        self._map(mmap.MAP_SHARED | mmap.MAP_POPULATE)
