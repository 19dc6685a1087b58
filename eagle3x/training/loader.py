"""Packed steps, read ahead by threads and sent ahead to the device.

Threads, not processes: what they do is copy from mapped files, for which no interpreter lock is held, and only in this
process can they write to the memory that the GPU reads by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from eagle3x.training.packing import Packed


@dataclass(frozen=True)
class Loader:
    """Iterates over `read(step)` of each of the steps, on `device`. threads: 0 reads when it is asked."""

    steps: Sequence[Sequence[int]]
    read: Callable[[Sequence[int]], Packed]
    device: torch.device
    threads: int

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Packed]:
        batches = map(self.read, self.steps) if self.threads == 0 else self._read_ahead()
        return batches if self.device.type == "cpu" else self._sent_ahead(batches)

    def _read_ahead(self) -> Iterator[Packed]:
        """In order, with two batches a thread on their way."""
        waiting: deque[Future[Packed]] = deque()
        with ThreadPoolExecutor(self.threads, thread_name_prefix="loader") as pool:
            try:
                for step in self.steps:
                    waiting.append(pool.submit(self.read, step))
                    if len(waiting) > 2 * self.threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _sent_ahead(self, batches: Iterator[Packed]) -> Iterator[Packed]:
        """Each batch is copied to the device while the one before it is computed."""
        copies = torch.cuda.Stream(self.device)

        def send(batch: Packed) -> tuple[Packed, torch.cuda.Event]:
            with torch.cuda.stream(copies):
                there, copied = batch.to(self.device), torch.cuda.Event()
                copied.record(copies)
            return there, copied

        ahead: tuple[Packed, torch.cuda.Event] | None = None
        for batch in batches:
            current, ahead = ahead, send(batch)
            if current is not None:
                yield self._arrived(*current)
        if ahead is not None:
            yield self._arrived(*ahead)

    def _arrived(self, batch: Packed, event: torch.cuda.Event) -> Packed:
        """The work to come waits for the copy, and the copy's memory for that work."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        batch.map(lambda x: x.record_stream(stream))
        return batch
