"""The memory through which captured states come: both ends, in two processes, as with an engine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle3x.engines.inside import states_ring
from eagle3x.engines.inside.states_ring import RingReader, RingWriter

SLOTS, S, H = 4, 3, 8
LONGEST = 700
SLOT_BYTES = LONGEST * S * H * 2


def states(step: int) -> torch.Tensor:
    """What step number `step` captures: another length each time, the longest among them."""
    tokens = LONGEST if step % 5 == 4 else 1 + 37 * step % 100
    return (torch.arange(tokens * S * H) + step).remainder(251).to(torch.bfloat16).view(tokens, S, H)


ENGINE = f"""
import sys
sys.path[:0] = [{str(Path(states_ring.__file__).parent)!r}, {str(Path(__file__).parent)!r}]
from states_ring import RingWriter
import torch
from test_states_ring import states
ring = RingWriter(sys.argv[1])
for step in range(int(sys.argv[2])):
    place = ring.take({SLOTS})
    print(place, flush=True)
    ring.write(place, {SLOTS}, states(step))
"""


def engine(ring: RingReader, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENGINE, ring.path, str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def next_states(ring: RingReader, process: subprocess.Popen[str]) -> torch.Tensor:
    assert process.stdout is not None
    place = int(process.stdout.readline())
    while not ring.written(place):
        assert process.poll() in (None, 0)
        time.sleep(0.001)
    return ring.read(place)


def test_states_arrive_as_written_and_a_slow_reader_makes_the_engine_wait() -> None:
    ring = RingReader(SLOTS, SLOT_BYTES)
    with engine(ring, 23) as process:
        for step in range(23):
            found = next_states(ring, process)
            if step == 0:
                time.sleep(0.3)  # it is far ahead by now: all places are taken
            assert found.dtype is torch.bfloat16
            assert torch.equal(found, states(step))
            del found
    ring.close()


def test_a_reader_that_keeps_everything_neither_stops_the_engine_nor_loses_anything() -> None:
    ring = RingReader(SLOTS, SLOT_BYTES)
    with engine(ring, 12) as process:
        kept = [next_states(ring, process)[1:, :2] for _ in range(12)]  # parts, as samples are
    ring.close()
    assert all(torch.equal(part, states(step)[1:, :2]) for step, part in enumerate(kept))


def test_a_place_is_free_when_the_last_part_is_forgotten() -> None:
    ring = RingReader(SLOTS, SLOT_BYTES)
    writer = RingWriter(ring.path)
    place = writer.take(SLOTS)
    writer.write(place, SLOTS, states(0))
    whole = ring.read(place)
    part = whole[:1].flatten(1)
    del whole
    assert ring.written(place)
    assert writer.take(SLOTS) != place
    del part
    assert writer.take(SLOTS) == place


def test_states_that_do_not_fit_are_refused_and_the_memory_has_no_name_left_behind() -> None:
    ring = RingReader(SLOTS, 4096)
    writer = RingWriter(ring.path)
    with pytest.raises(ValueError, match=r"do not fit into 4096 bytes"):
        writer.write(writer.take(SLOTS), SLOTS, torch.zeros(4097, 1, 1, dtype=torch.uint8))
    ring.close()
    with pytest.raises(FileNotFoundError):
        RingWriter(ring.path)
