"""Captured states as they come out of vLLM and SGLang: step by step, put together sample by sample.

The engine leaves the states of each of its steps in shared memory (`inside/states_ring.py`) and pauses while all of
that waits to be read here. A step has rows of many samples, and a long sample can have rows in many steps (chunked
prefill). Shapes: N tokens of one step, A boundaries, H hidden size, T tokens of one sample.

A step's `rows`: [[number of the sample, its first row here, that row's position in the sample, how many], ...]. Its
tensors: aux [N, A*H] and last [N, H], as shards have them, so that nothing is rearranged on a CPU; their norms [N, A+1]
float32, which cost a GPU nothing; and the token ids [N] where it is the engine's worker that knows which ones it
computed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3x.engines.resolved import DTYPE_BYTES
from eagle3x.types import EagleError, HiddenStates, LastNorm, TokenSample

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3x.engines.child import Worker
    from eagle3x.engines.inside.states_ring import RingReader, Step

STEPS_ALIVE = 8
"""Steps whose states can exist at once: being computed, waiting, being written to shards."""
ROW_BYTES = 64
"""What a token takes at most besides its states: its id, and a row if it is all that a step has of its sample."""
NORM_BYTES = 4
POLL_SECONDS = 0.001
GIB = 1024**3


def states_ring(step_tokens: int, boundaries: int, hidden_size: int, dtype: str, fewer: str) -> RingReader:
    """Memory for an engine's steps of at most `step_tokens` tokens, each with states at `boundaries` and the last one.

    Raises:
        EagleError: the machine has not that much; `fewer` is the engine argument that makes the steps smaller.
    """
    from eagle3x.engines.inside.states_ring import RingReader

    step = step_tokens * ((boundaries + 1) * (hidden_size * DTYPE_BYTES[dtype] + NORM_BYTES) + ROW_BYTES)
    free = available_memory()
    if STEPS_ALIVE * step > free:
        raise EagleError(
            f"captured states on their way to disk need {STEPS_ALIVE * step / GIB:.1f} GiB of memory, {free / GIB:.1f}"
            f" GiB are free: make room, or lower backend.engine_args.{fewer}"
        )
    return RingReader(STEPS_ALIVE, step)


def available_memory() -> int:
    """Bytes that this machine's programs can still take, as Linux estimates it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise EagleError("/proc/meminfo does not say how much memory is available")
    return int(found[1]) * 1024


def captured(
    worker: Worker, ring: RingReader, samples: Sequence[TokenSample], last_norm: LastNorm
) -> Iterator[HiddenStates]:
    """Have `worker`, whose engine writes to `ring`, capture `samples`; yields each when it is complete.

    Raises:
        EagleError: the engine failed, or left states out (`Assembly`). EngineDied: it ended; with the end of its log.
    """
    assembly = Assembly(samples, last_norm)
    replies = worker.request({"op": "capture", "samples": [sample.token_ids for sample in samples]})
    try:
        while not worker.answered(POLL_SECONDS):
            yield from assembly.completed(ring.steps())
        for reply in replies:
            raise EagleError(f"the worker said {reply} while it captured")
        while ring.pending:  # the engine answers before a GPU has copied everything
            worker.require_running("the engine, while it captured states,")
            time.sleep(POLL_SECONDS)
        yield from assembly.completed(ring.steps())
        assembly.require_all()
    except EagleError:
        try:
            yield from assembly.completed(ring.steps())  # what came before was paid for
        finally:
            worker.stop()
        raise
    except BaseException:  # also if nobody wants the rest: it would be taken for the next request's
        worker.stop()
        raise


class Assembly:
    """Puts `samples` together; row `number` of a step is of `samples[number]`."""

    def __init__(self, samples: Sequence[TokenSample], last_norm: LastNorm) -> None:
        self._samples = [_Sample(sample) for sample in samples]
        self._last_norm: LastNorm = last_norm

    def completed(self, steps: Iterator[Step]) -> Iterator[HiddenStates]:
        """Samples that these steps complete. One that a step has whole is handed on as it lies there, without a copy.

        Raises:
            EagleError: a token with two states, or other tokens than those of the sample: a request that was restarted.
        """
        for step in steps:
            aux, last, norms, *ids = step.tensors
            token_ids = ids[0].tolist() if ids else None
            for number, first, position, length in step.rows:
                sample = self._samples[number]
                if position >= len(sample.given.token_ids):
                    continue  # a prefill that shares its step with decoding: a token that the engine wrote itself
                rows = slice(first, first + length)
                found = aux[rows], last[rows], norms[rows]
                sample.add(position, length, found, None if token_ids is None else token_ids[rows])
                if (whole := sample.complete()) is not None:
                    given = sample.given
                    yield HiddenStates(given.id, given.token_ids, whole[0], whole[1], self._last_norm, whole[2])
                    del whole
                del found
            del aux, last, norms, ids, step

    def require_all(self) -> None:
        """The engine has read every sample, so all states must have been there.

        Raises:
            EagleError: tokens without states.
        """
        if lacking := [sample for sample in self._samples if sample.tokens < len(sample.given.token_ids)]:
            first = lacking[0]
            raise EagleError(
                f"no states came for {len(lacking)} of {len(self._samples)} samples, among them {first.given.id} with"
                f" {first.tokens} of {len(first.given.token_ids)} tokens: the target's class does not capture, or a"
                " prefix cache is on (the engine's log may say which model it could not load)"
            )


@dataclass
class _Sample:
    """What has come of a sample: aux, last and norms, with `tokens` of their rows filled, those of `pieces`."""

    given: TokenSample
    tokens: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    states: tuple[Tensor, ...] | None = None

    def add(self, position: int, length: int, states: tuple[Tensor, ...], token_ids: list[int] | None) -> None:
        end, wanted = position + length, self.given.token_ids
        if {len(part) for part in states} != {length} or end > len(wanted):
            raise EagleError(
                f"{self.given.id}: {len(states[0])} states for tokens {position} to {end} of {len(wanted)}"
            )
        if token_ids is not None and tuple(token_ids) != wanted[position:end]:
            raise EagleError(f"{self.given.id}: tokens {position} to {end} are not those of the sample")
        if any(position < other_end and other < end for other, other_end in self.pieces):
            raise EagleError(f"{self.given.id}: the engine computed tokens {position} to {end} twice")
        self.pieces.append((position, end))
        self.tokens += length
        if length == len(wanted):
            self.states = states
            return
        if self.states is None:  # copied out piece by piece: what waits for its rest must not hold the engine's memory
            self.states = tuple(part.new_empty(len(wanted), *part.shape[1:]) for part in states)
        for whole, part in zip(self.states, states, strict=True):
            whole[position:end] = part

    def complete(self) -> tuple[Tensor, ...] | None:
        """Its states, once all are there; they are given away."""
        if self.tokens < len(self.given.token_ids):
            return None
        states, self.states = self.states, None
        return states
