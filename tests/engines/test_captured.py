"""States are put together from steps laid out by hand: 3 samples over 3 steps, H=2, 2 boundaries and the last state.

And as they come from a process that fills the memory as engines do.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle3x.engines.captured import Assembly, captured
from eagle3x.engines.child import EngineDied, Worker
from eagle3x.engines.inside import states_ring
from eagle3x.engines.inside.states_ring import RingReader, Step
from eagle3x.types import EagleError, HiddenStates, TokenSample

A, B, C = TokenSample("a", (11, 12, 13)), TokenSample("b", (21,)), TokenSample("c", (31, 32, 33, 34, 35))
Rows = list[list[int]]


def states_of(tokens: list[int]) -> list[torch.Tensor]:
    """[N, 4], [N, 2], [N, 3]: of token t the boundaries (t.1, t.2) and (t.3, t.4), the last state (-t, -t), and as
    their lengths, so that each is told apart, t, 2t and 3t."""
    ids = torch.tensor(tokens)[:, None].float()
    return [ids + torch.tensor([0.1, 0.2, 0.3, 0.4]), -ids.repeat(1, 2), ids * torch.tensor([1.0, 2.0, 3.0])]


def step(rows: Rows, tokens: list[int]) -> Step:
    return Step(rows, [*states_of(tokens), torch.tensor(tokens)])


def check(found: HiddenStates) -> None:
    aux, last, norms = states_of(list(found.token_ids))
    torch.testing.assert_close(found.aux, aux)
    torch.testing.assert_close(found.last, last)
    torch.testing.assert_close(found.norms, norms)


def assemble(samples: list[TokenSample], steps: list[Step]) -> list[HiddenStates]:
    assembly = Assembly(samples, "post_norm")
    found = list(assembly.completed(iter(steps)))
    assembly.require_all()
    return found


def test_pieces_of_mixed_steps_are_joined_by_position() -> None:
    steps = [
        step([[0, 0, 0, 3], [2, 3, 0, 2]], [11, 12, 13, 31, 32]),
        step([[2, 1, 4, 1], [1, 0, 0, 1]], [21, 35]),  # the last piece of c before the one in the middle
        step([[1, 0, 1, 1], [2, 2, 2, 2]], [99, 77, 33, 34]),  # b's own output, and a row that nobody asked for
    ]
    found = assemble([A, B, C], steps)
    assert [(s.id, s.token_ids, s.last_norm) for s in found] == [(s.id, s.token_ids, "post_norm") for s in (A, B, C)]
    for states in found:
        check(states)


def test_a_sample_that_a_step_has_whole_is_not_copied() -> None:
    whole = step([[0, 0, 0, 3]], [11, 12, 13])
    (states,) = assemble([A], [whole])
    assert states.aux.data_ptr() == whole.tensors[0].data_ptr()
    assert states.last.data_ptr() == whole.tensors[1].data_ptr()


def test_a_piece_does_not_hold_the_memory_of_its_step() -> None:
    memory = memoryview(bytearray(b"".join(part.numpy().tobytes() for part in states_of([31, 32]))))
    states, freed = torch.frombuffer(memory, dtype=torch.float32), weakref.ref(memory)
    parts = [states[:8].view(2, 4), states[8:12].view(2, 2), states[12:].view(2, 3)]
    steps = iter([Step([[0, 0, 0, 2]], parts)])
    del memory, states, parts
    assembly = Assembly([C], "post_norm")
    assert list(assembly.completed(steps)) == []
    assert freed() is None
    (found,) = assembly.completed(iter([step([[0, 0, 2, 3]], [33, 34, 35])]))
    check(found)


def test_an_engine_that_does_not_say_which_tokens_it_computed() -> None:
    (states,) = assemble([A], [Step([[0, 0, 0, 3]], states_of([11, 12, 13]))])
    check(states)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([([[0, 0, 0, 3]], [11, 12, 13])], "no states came for 1 of 2 samples, among them b with 0 of 1"),
        ([([[1, 0, 0, 1], [0, 1, 1, 2]], [21, 12, 13])], "among them a with 2 of 3"),
        ([([[0, 0, 0, 3]], [11, 13, 12])], "a: tokens 0 to 3 are not those of the sample"),
        ([([[0, 0, 0, 2]], [11, 12]), ([[0, 0, 1, 2]], [12, 13])], "a: the engine computed tokens 1 to 3 twice"),
        ([([[0, 0, 0, 3]], [11, 12, 13]), ([[0, 0, 0, 3]], [11, 12, 13])], "tokens 0 to 3 twice"),
        ([([[0, 0, 1, 3]], [12, 13, 14])], "a: 3 states for tokens 1 to 4 of 3"),
        ([([[0, 0, 0, 3]], [11, 12])], "a: 2 states for tokens 0 to 3 of 3"),
    ],
)
def test_what_does_not_fit_is_an_error(steps: list[tuple[Rows, list[int]]], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        assemble([A, B], [step(*given) for given in steps])


ENGINE = f"""
import json, os, sys
sys.path[:0] = [{str(Path(states_ring.__file__).parent)!r}, {str(Path(__file__).parent)!r}]
from states_ring import RingWriter
import torch
from test_captured import states_of
ring = RingWriter(sys.argv[1])
replies = os.fdopen(int(os.environ["EAGLE3X_REPLY_FD"]), "w", buffering=1)
for line in sys.stdin:
    chunks = [
        (number, position, tokens[position : position + 2])
        for number, tokens in enumerate(json.loads(line)["samples"])
        for position in range(0, len(tokens), 2)
    ]
    for number, position, tokens in chunks:
        if tokens[0] == 66:
            sys.exit("out of memory")
        ring.write(ring.take(), [[number, 0, position, len(tokens)]], [*states_of(tokens), torch.tensor(tokens)])
    print(json.dumps({{"done": True}}), file=replies)
"""
"""Two tokens a step; ends at token 66."""
LONG = TokenSample("long", tuple(range(100, 123)))
"""12 steps, in a memory of 4."""


@pytest.fixture
def ring() -> Iterator[RingReader]:
    made = RingReader(4, 4096)
    yield made
    made.close()


def engine(ring: RingReader, folder: Path) -> Worker:
    return Worker([sys.executable, "-c", ENGINE, ring.path], folder / "log")


def test_a_sample_may_take_more_steps_than_the_memory_has_places(ring: RingReader, tmp_path: Path) -> None:
    """The engine says nothing before all of it was read, and is asked again afterwards."""
    with engine(ring, tmp_path) as worker:
        for samples in ([LONG, A], [C]):
            found = list(captured(worker, ring, samples, "post_norm"))
            assert [states.id for states in found] == [sample.id for sample in samples]
            for states in found:
                check(states)


def test_an_engine_that_ends_while_it_captures(ring: RingReader, tmp_path: Path) -> None:
    with engine(ring, tmp_path) as worker:
        states = captured(worker, ring, [A, TokenSample("end", (66,)), LONG], "post_norm")
        check(next(states))
        with pytest.raises(EngineDied, match=r"exited with code 1[\s\S]*out of memory"):
            list(states)


def test_what_an_engine_left_before_it_ended_is_handed_on(ring: RingReader, tmp_path: Path) -> None:
    with engine(ring, tmp_path) as worker:
        found = []
        with pytest.raises(EngineDied):
            found.extend(s.id for s in captured(worker, ring, [B, TokenSample("end", (66,))], "post_norm"))
        assert found == ["b"]


def test_states_that_nobody_wants_any_more_end_the_engine(ring: RingReader, tmp_path: Path) -> None:
    """They would be taken for those of the next samples."""
    with engine(ring, tmp_path) as worker:
        states = captured(worker, ring, [A, LONG, LONG, LONG], "post_norm")
        next(states)
        states.close()  # type: ignore[attr-defined]  # a generator
        assert not worker.running
