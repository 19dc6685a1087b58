"""The memory through which captured states come: both ends, in two processes, as with an engine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle3x.engines.inside import states_ring
from eagle3x.engines.inside.states_ring import RingReader, RingWriter, Step

SLOTS, S, H = 4, 3, 8
LONGEST = 700
SLOT_BYTES = LONGEST * (S * H * 2 + 8) + 256


def states(step: int) -> torch.Tensor:
    """What step number `step` captures: another length each time, the longest among them."""
    tokens = LONGEST if step % 5 == 4 else 1 + 37 * step % 100
    return (torch.arange(tokens * S * H) + step).remainder(251).to(torch.bfloat16).view(tokens, S, H)


def ids(step: int) -> torch.Tensor:
    return torch.arange(len(states(step))) - step


ENGINE = f"""
import sys
sys.path[:0] = [{str(Path(states_ring.__file__).parent)!r}, {str(Path(__file__).parent)!r}]
from states_ring import RingWriter
import torch
from test_states_ring import ids, states
ring = RingWriter(sys.argv[1])
for step in range(int(sys.argv[2])):
    ring.write(ring.take(), [step], [states(step), ids(step)])
"""


def engine(ring: RingReader, steps: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", ENGINE, ring.path, str(steps)])


def each(ring: RingReader, process: subprocess.Popen[bytes], steps: int) -> Iterator[Step]:
    while steps:
        assert process.poll() in (None, 0)
        for step in ring.steps():
            steps -= 1
            yield step
            del step
        time.sleep(0.001)


def test_steps_arrive_as_written_and_a_slow_reader_makes_the_engine_wait() -> None:
    ring = RingReader(SLOTS, SLOT_BYTES)
    seen = []
    with engine(ring, 23) as process:
        for step in each(ring, process, 23):
            if not seen:
                time.sleep(0.3)  # it is far ahead by now: all places are taken
            (number,), (found, token_ids) = step.rows, step.tensors
            seen.append(number)
            assert found.dtype is torch.bfloat16
            assert torch.equal(found, states(number))
            assert torch.equal(token_ids, ids(number))
            del step, found, token_ids
    assert sorted(seen) == list(range(23))
    assert not ring.pending
    ring.close()


def test_a_reader_that_keeps_everything_neither_stops_the_engine_nor_loses_anything() -> None:
    ring = RingReader(SLOTS, SLOT_BYTES)
    with engine(ring, 12) as process:
        kept = {step.rows[0]: step.tensors[0][1:, :2] for step in each(ring, process, 12)}  # parts, as samples are
    ring.close()
    assert sorted(kept) == list(range(12))
    assert all(torch.equal(part, states(number)[1:, :2]) for number, part in kept.items())


def test_a_place_is_free_when_the_last_part_is_forgotten() -> None:
    ring = RingReader(SLOTS, SLOT_BYTES)
    writer = RingWriter(ring.path)
    assert [writer.take(), writer.take()] == [0, 1]
    assert ring.pending
    writer.write(1, [], [states(0), ids(0)])
    (step,) = ring.steps()
    part, token_ids = step.tensors[0][:1].flatten(1), step.tensors[1]
    del step
    assert list(ring.steps()) == []  # it is handed out once
    del part
    assert writer.take() == 2
    del token_ids
    assert writer.take() == 1


def test_a_place_that_is_being_filled_is_never_free_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may look for one between any two bytes that this one writes."""
    ring = RingReader(SLOTS, SLOT_BYTES)
    writer = RingWriter(ring.path)
    slot = writer.take()
    seen: set[int] = set()
    real = states_ring.NOTE_BYTES

    class Watched:
        size = real.size

        def pack_into(self, memory: bytearray, offset: int, value: int) -> None:
            before = memory[states_ring._header(slot)]
            memory[states_ring._header(slot)] = 77  # whatever is there stays there
            real.pack_into(memory, offset, value)
            seen.update({before, memory[states_ring._header(slot)]})
            memory[states_ring._header(slot)] = before

    monkeypatch.setattr(states_ring, "NOTE_BYTES", Watched())
    writer.write(slot, [0], [states(0), ids(0)])
    assert seen == {states_ring.TAKEN, 77}
    (step,) = ring.steps()
    assert torch.equal(step.tensors[0], states(0))


FAILING = f"""
import sys
sys.path[:0] = [{str(Path(states_ring.__file__).parent)!r}]
from concurrent.futures import ThreadPoolExecutor
from states_ring import RingWriter
import time
class Event:
    def synchronize(self):
        raise RuntimeError("an illegal memory access was encountered")
ring = RingWriter(sys.argv[1])
ThreadPoolExecutor(1).submit(ring._announce, ring.take(), Event())
time.sleep(60)
"""


def test_a_copy_that_fails_ends_the_engine() -> None:
    ring = RingReader(SLOTS, SLOT_BYTES)
    command = [sys.executable, "-c", FAILING, ring.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "illegal memory access" in done.stderr


def test_states_that_do_not_fit_are_refused_and_the_memory_has_no_name_left_behind() -> None:
    ring = RingReader(SLOTS, 4096)
    writer = RingWriter(ring.path)
    with pytest.raises(ValueError, match=r"1 rows with .*uint8.* do not fit into 4096 bytes"):
        writer.write(writer.take(), [0], [torch.zeros(4096 - 63, dtype=torch.uint8)])  # the note takes a line of 64
    ring.close()
    with pytest.raises(FileNotFoundError):
        RingWriter(ring.path)
