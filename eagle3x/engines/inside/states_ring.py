"""Memory in which an engine leaves captured states for eagle3x: no file is written, nothing is copied twice.

Both ends are here: `RingReader` in eagle3x's process makes the memory, `RingWriter` in the engine's fills it. Imports
torch and the standard library only. The memory is anonymous (memfd): it needs no room in /dev/shm, has no name that
could stay behind, and is gone with the last process that maps it. A GPU writes straight into it.

    page 0             one header a slot: state, dtype, N, S, H
    from page 1 on     the slots: [N, S, H] of one engine step each (N tokens, S states of a token, H hidden size)

A slot is FREE, TAKEN (a step that will fill it was scheduled), WRITTEN, and FREE again once its reader is done.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

FREE, TAKEN, WRITTEN = range(3)
HEADER = struct.Struct("<B15s3Q")
"""State, name of the dtype, and N, S, H. The state is one byte: whoever reads it sees the old one or the new one."""
PAGE = mmap.PAGESIZE
PAUSE_SECONDS = 0.0005


class RingReader:
    """Makes the memory, and hands out what is written to it.

    `path`: what a `RingWriter` of this user opens while this process lives.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """OSError if there is no memory for it."""
        if not 2 < slots <= PAGE // HEADER.size:
            raise ValueError(f"a ring has 3 to {PAGE // HEADER.size} slots, not {slots}")
        self._descriptor = os.memfd_create("eagle3x-states")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._slots, self._slot_bytes = slots, -(-slot_bytes // PAGE) * PAGE
        os.ftruncate(self._descriptor, PAGE + slots * self._slot_bytes)
        self._memory = mmap.mmap(self._descriptor, 0)
        self._held: set[int] = set()

    @property
    def slots(self) -> int:
        """How many there are."""
        return self._slots

    def written(self, slot: int) -> bool:
        """Whether the states of the step that took `slot` are there."""
        return self._memory[slot * HEADER.size] == WRITTEN

    def read(self, slot: int) -> Tensor:
        """[N, S, H]; the slot is free again when nothing refers to them any more.

        Once nearly all slots are referred to, a copy: a reader that keeps everything must not stop the engine.
        """
        _, name, *shape = HEADER.unpack_from(self._memory, slot * HEADER.size)
        dtype = getattr(torch, name.rstrip(b"\0").decode())
        start, size = PAGE + slot * self._slot_bytes, dtype.itemsize * shape[0] * shape[1] * shape[2]
        rows = memoryview(self._memory)[start : start + size]
        self._held.add(slot)
        weakref.finalize(rows, self._release, slot)
        states = torch.frombuffer(rows, dtype=dtype).view(shape)  # refers to `rows`, as do all views of it
        return states if len(self._held) < self._slots - 1 else states.clone()

    def close(self) -> None:
        """No writer can open it any more. States that were handed out stay."""
        os.close(self._descriptor)

    def _release(self, slot: int) -> None:
        self._held.discard(slot)
        self._memory[slot * HEADER.size] = FREE


class RingWriter:
    """The engine's end: one process takes slots, the same or another one fills them."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._copies: torch.cuda.Stream | None = None
        self._announcer: ThreadPoolExecutor | None = None

    def pin(self) -> None:
        """Let the GPU write to it; copies then run beside the engine's own work."""
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        code = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
        if code != 0:
            raise RuntimeError(f"{whole.numel()} bytes for captured states cannot be pinned: CUDA error {code}")
        self._copies = torch.cuda.Stream()
        self._announcer = ThreadPoolExecutor(1, thread_name_prefix="eagle3x-states")

    def take(self, slots: int) -> int:
        """One of the `slots`, once one is free."""
        while True:
            for slot in range(slots):
                if self._memory[slot * HEADER.size] == FREE:
                    self._memory[slot * HEADER.size] = TAKEN
                    return slot
            time.sleep(PAUSE_SECONDS)

    def write(self, slot: int, slots: int, states_NSH: Tensor) -> None:
        """Fill a slot that was taken. ValueError if the states do not fit into it."""
        slot_bytes = (len(self._memory) - PAGE) // slots
        if states_NSH.nbytes > slot_bytes:
            raise ValueError(f"{list(states_NSH.shape)} {states_NSH.dtype} do not fit into {slot_bytes} bytes")
        name = str(states_NSH.dtype).removeprefix("torch.").encode()
        HEADER.pack_into(self._memory, slot * HEADER.size, TAKEN, name, *states_NSH.shape)
        place = torch.frombuffer(
            self._memory, dtype=states_NSH.dtype, count=states_NSH.numel(), offset=PAGE + slot * slot_bytes
        ).view(states_NSH.shape)
        if self._copies is None or self._announcer is None:
            place.copy_(states_NSH)
            self._memory[slot * HEADER.size] = WRITTEN
            return
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            place.copy_(states_NSH, non_blocking=True)
            states_NSH.record_stream(self._copies)
            copied = self._copies.record_event()
        self._announcer.submit(self._announce, slot, copied)

    def _announce(self, slot: int, copied: torch.cuda.Event) -> None:
        copied.synchronize()
        self._memory[slot * HEADER.size] = WRITTEN
