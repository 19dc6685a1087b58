"""Slots of the KV pool, on tables small enough to be read."""

from __future__ import annotations

import pytest
import torch
from sgl_kernel.cache_slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from torch import Tensor


def table() -> Tensor:
    """3 rows of 8: row r holds 10*r + 0..7."""
    return (torch.arange(3)[:, None] * 10 + torch.arange(8)).int()


ROWS = torch.tensor([2, 0])


def test_new_slots_are_entered_request_after_request() -> None:
    changed = table()
    assign_req_to_token_pool_cpu(
        ROWS, changed, torch.tensor([1, 6]), torch.tensor([3, 7]), torch.tensor([91, 92, 93]), 8
    )
    expected = table()
    expected[2, 1:3] = torch.tensor([91, 92])
    expected[0, 6] = 93
    assert torch.equal(changed, expected)


def test_slots_are_read_request_after_request() -> None:
    out = torch.full((4,), -1)
    assign_extend_cache_locs_cpu(ROWS, table(), torch.tensor([1, 6]), torch.tensor([3, 7]), out, 8)
    assert out.tolist() == [21, 22, 6, -1]


def test_draft_slots_follow_the_text() -> None:
    out = torch.full((8,), -1)
    assign_draft_cache_locs_contiguous_cpu(ROWS, table(), torch.tensor([1, 3]), out, 8, topk=2, num_cols=2)
    assert out.tolist() == [21, 22, 23, 24, 3, 4, 5, 6]


def test_accepted_slots_are_packed_to_the_front() -> None:
    out = torch.full((5,), -1)
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1]])
    fill_accept_out_cache_loc_cpu(accepted, torch.tensor([50, 51, 52, 53, 54, 55]), out)
    assert out.tolist() == [50, 52, 53, -1, -1]


def test_each_branch_reads_the_text_and_its_own_drafts() -> None:
    out = build_draft_decode_metadata_cpu(table(), ROWS, torch.tensor([2, 3]), topk=2, num_steps=2, pool_len=8)
    assert out.tolist() == [
        [20, 21, 22, 23, 0, 0, 0, 0],
        [20, 21, 24, 25, 0, 0, 0, 0],
        [0, 1, 2, 3, 4, 0, 0, 0],
        [0, 1, 2, 5, 6, 0, 0, 0],
    ]


def test_moving_slots_reads_all_before_it_writes() -> None:
    small, large = torch.arange(4.0)[:, None], torch.arange(8.0).view(4, 2)
    copy_all_layer_kv_cache_cpu(
        torch.tensor([small.data_ptr(), large.data_ptr()]),
        torch.tensor([4, 8]),
        tgt_loc=torch.tensor([0, 1]),
        src_loc=torch.tensor([1, 2]),
    )
    assert small.flatten().tolist() == [1, 2, 2, 3]
    assert large.tolist() == [[2, 3], [4, 5], [4, 5], [6, 7]]


def test_a_table_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="8 columns, not 9"):
        assign_extend_cache_locs_cpu(ROWS, table(), torch.tensor([0, 0]), torch.tensor([1, 1]), torch.zeros(2), 9)
