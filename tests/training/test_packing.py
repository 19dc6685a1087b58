"""The shift between states, tokens, labels and masks, on the sequence that training/packing.py draws."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle3x.training.packing import keep_rows, kept, pack, plan, shares

A, B, C, D, E, F = range(6)
MASK = torch.tensor([False, False, True, True, True, False])


def document(tokens: list[int], mask: torch.Tensor, first_state: float) -> SimpleNamespace:
    """State of position i: aux (i, i), last i, counted from first_state."""
    index = torch.arange(len(tokens)) + first_state
    return SimpleNamespace(
        token_ids=torch.tensor(tokens), loss_mask=mask, aux=torch.stack([index, index], 1), last=index[:, None]
    )


def test_rows_in_the_loss_are_those_of_the_drawing() -> None:
    # row          x0(b)  x1(C)  x2(D)  x3(E)  x4(f)  x5
    # step 0 says  C      D      E      f      -      -
    # step 1 says  D      E      f      -      -      -
    # step 2 says  E      f      -      -      -      -
    assert keep_rows(MASK, 3).tolist() == [
        [True, True, True, False, False, False],
        [True, True, False, False, False, False],
        [True, False, False, False, False, False],
    ]


def test_a_label_right_after_the_first_token_has_no_row() -> None:
    # Nothing is drafted for position 1: row -1 would have to say it.
    assert keep_rows(torch.tensor([True, True, True]), 2).tolist() == [[True, False, False], [False, False, False]]
    assert keep_rows(torch.tensor([True, True]), 2).tolist() == [[False, False], [False, False]]


def test_documents_lie_side_by_side_and_their_rows_do_not_meet() -> None:
    documents = [document([A, B, C, D, E, F], MASK, 10), document([7, 8, 9], torch.tensor([False, True, True]), 20)]
    packed = pack(documents, kept(documents, 2), [1.0, 1.0], 4)
    assert packed.token_ids.tolist() == [A, B, C, D, E, F, 7, 8, 9]
    assert packed.aux[:, 1].tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22]
    assert packed.layout.rows.tolist() == [0, 1, 2, 6]
    assert packed.pairs.labels.tolist() == [1, 2, 3, 7]
    assert packed.last[:, 0].tolist() == [11, 12, 13, 21]
    assert kept(documents, 2).tolist() == [
        [True, True, True, False, False, False, True, False, False],
        [True, True, False, False, False, False, False, False, False],
    ]


def test_a_position_that_may_not_teach_takes_out_every_row_that_it_taught() -> None:
    # Position 2 (state x2) teaches D -> E: row x1 of step 0 and row x0 of step 1.
    teachable = torch.tensor([True, True, False, True, True, True])
    assert kept([document([A, B, C, D, E, F], MASK, 0)], 2, [teachable]).tolist() == [
        [True, False, True, False, False, False],
        [False, True, False, False, False, False],
    ]


def test_every_epoch_reads_every_sample_once_within_the_budget() -> None:
    lengths = [5, 3, 9, 2, 2, 7, 1]
    steps = plan(lengths, 10, epochs=3, seed=4)
    seen: list[int] = []
    epochs = []
    for step in steps:
        assert sum(lengths[i] for i in step) <= 10
        seen += step
        if len(seen) == len(lengths):
            epochs.append(seen)
            seen = []
    assert not seen
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1]
    assert plan(lengths, 10, 3, 4) == steps
    assert plan(lengths, 10, 3, 5) != steps


def test_a_long_sample_is_not_cut() -> None:
    assert sorted(map(sorted, plan([25, 1, 1], 10, 1, 0))) in ([[0], [1, 2]], [[0], [1], [2]])


@pytest.mark.parametrize(
    ("total", "parts", "ends"), [(10, 2, [5, 10]), (10, 3, [3, 7, 10]), (2, 5, [1, 2]), (7, 1, [7])]
)
def test_segments_end_evenly_and_at_the_end(total: int, parts: int, ends: list[int]) -> None:
    from eagle3x.training.datamodule import evenly

    assert evenly(total, parts) == ends


def test_shares_the_longest_document_first_to_whoever_has_least() -> None:
    # 9 | 5, then 4 to the second (9 | 9), 3 to the first (12 | 9), 2 to the second (12 | 11); each in its old order.
    assert shares([3, 9, 5, 4, 2], 2) == [[0, 1], [2, 3, 4]]
    assert shares([8, 8, 8, 8], 2) == [[0, 2], [1, 3]]
    assert shares([7], 2) == [[0], []]
