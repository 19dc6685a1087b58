"""Memory in which an engine leaves captured states for eagle3x: no file is written, nothing is copied twice.

Both ends are here: `RingReader` in eagle3x's process makes the memory, `RingWriter` in the engine's fills it. Imports
torch and the standard library only. The memory is anonymous (memfd): it needs no room in /dev/shm, has no name that
could stay behind, and is gone with the last process that maps it. A GPU writes straight into it.

    page 0             number of slots and bytes of each; a header a slot: its state, and the bytes of its note
    from page 1 on     the slots. In each, of one engine step: a note (JSON), then tensors, wherever a cache line begins

The note says what the tensors are, and which of their rows belong to whom: {"rows": ..., "tensors": [[dtype, shape],
...]}. A slot is FREE, TAKEN (a step that will fill it was scheduled), WRITTEN, READ (something still refers to it), and
FREE again.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

FREE, TAKEN, WRITTEN, READ = range(4)
SIZES = struct.Struct("<2Q")
"""Number of slots, and bytes of each."""
HEADER = struct.Struct("<BxxxI")
"""State, and bytes of the note. The state is only ever written alone, as one byte: whoever reads it sees the old one or
the new one (`pack_into` would first write zeros, and 0 is FREE)."""
NOTE_BYTES = struct.Struct("<I")
"""The second of them."""
PAGE = mmap.PAGESIZE
CACHE_LINE = 64
PAUSE_SECONDS = 0.0005


@dataclass(frozen=True)
class Step:
    """What an engine step left: `rows`, as its `RingWriter.write` was given them, and its tensors."""

    rows: list[Any]
    tensors: list[Tensor]


class RingReader:
    """Makes the memory, and hands out what is written to it.

    `path`: what a `RingWriter` of this user opens while this process lives.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """OSError if there is no memory for it."""
        if not 2 < slots <= (PAGE - SIZES.size) // HEADER.size:
            raise ValueError(f"a ring has 3 to {(PAGE - SIZES.size) // HEADER.size} slots, not {slots}")
        self._descriptor = os.memfd_create("eagle3x-states")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._slots, self._slot_bytes = slots, -(-slot_bytes // PAGE) * PAGE
        os.ftruncate(self._descriptor, PAGE + slots * self._slot_bytes)
        self._memory = mmap.mmap(self._descriptor, 0)
        SIZES.pack_into(self._memory, 0, slots, self._slot_bytes)
        self._held: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether the states of a step are on their way."""
        return any(self._memory[_header(slot)] == TAKEN for slot in range(self._slots))

    def steps(self) -> Iterator[Step]:
        """Those that were written since the last call; a slot is free again when nothing refers to its tensors.

        Once nearly all slots are referred to, the tensors are copies: a reader that keeps everything must not stop the
        engine.
        """
        for slot in range(self._slots):
            if self._memory[_header(slot)] == WRITTEN:
                yield self._read(slot)

    def close(self) -> None:
        """No writer can open it any more. States that were handed out stay."""
        os.close(self._descriptor)

    def _read(self, slot: int) -> Step:
        self._memory[_header(slot)] = READ
        self._held.add(slot)
        _, note_bytes = HEADER.unpack_from(self._memory, _header(slot))
        start = PAGE + slot * self._slot_bytes
        content = memoryview(self._memory)[start : start + self._slot_bytes]
        weakref.finalize(content, self._release, slot)  # the tensors refer to `content`, as do all views of them
        note = json.loads(bytes(content[:note_bytes]))
        described = [(getattr(torch, dtype), shape) for dtype, shape in note["tensors"]]
        places, _ = _layout(note_bytes, [dtype.itemsize * _count(shape) for dtype, shape in described])
        tensors = [
            torch.frombuffer(content, dtype=dtype, count=_count(shape), offset=place).view(shape)
            for place, (dtype, shape) in zip(places, described, strict=True)
        ]
        if len(self._held) >= self._slots - 1:
            tensors = [tensor.clone() for tensor in tensors]
        return Step(note["rows"], tensors)

    def _release(self, slot: int) -> None:
        self._held.discard(slot)
        self._memory[_header(slot)] = FREE


class RingWriter:
    """The engine's end: one process takes slots, the same or another one fills them."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._slots, self._slot_bytes = SIZES.unpack_from(self._memory, 0)
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

    def take(self) -> int:
        """A slot, once one is free."""
        while True:
            for slot in range(self._slots):
                if self._memory[_header(slot)] == FREE:
                    self._memory[_header(slot)] = TAKEN
                    return slot
            time.sleep(PAUSE_SECONDS)

    def write(self, slot: int, rows: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Fill a slot that was taken; without waiting for the GPU, if it is `pin`ned. `rows`: what JSON has types for.

        Raises:
            ValueError: they do not fit into it.
        """
        described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        note = json.dumps({"rows": rows, "tensors": described}).encode()
        places, end = _layout(len(note), [tensor.nbytes for tensor in tensors])
        if end > self._slot_bytes:
            raise ValueError(f"{len(rows)} rows with {described} do not fit into {self._slot_bytes} bytes")
        start = PAGE + slot * self._slot_bytes
        self._memory[start : start + len(note)] = note
        NOTE_BYTES.pack_into(self._memory, _header(slot) + HEADER.size - NOTE_BYTES.size, len(note))
        copies = [
            torch.frombuffer(self._memory, dtype=t.dtype, count=t.numel(), offset=start + place).view(t.shape)
            for place, t in zip(places, tensors, strict=True)
        ]
        if self._copies is None or self._announcer is None:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            self._memory[_header(slot)] = WRITTEN
            return
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)
            copied = self._copies.record_event()
        self._announcer.submit(self._announce, slot, copied)

    def _announce(self, slot: int, copied: torch.cuda.Event) -> None:
        try:
            copied.synchronize()
        except BaseException:  # nobody waits for this thread, and the reader would wait for the slot for ever
            traceback.print_exc()
            os._exit(1)
        self._memory[_header(slot)] = WRITTEN


def _header(slot: int) -> int:
    return SIZES.size + slot * HEADER.size


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _layout(note_bytes: int, tensor_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Where in a slot its tensors begin, and where the last of them ends."""
    places, end = [], note_bytes
    for size in tensor_bytes:
        places.append(-(-end // CACHE_LINE) * CACHE_LINE)
        end = places[-1] + size
    return places, end
