"""Tokens of flattened rows, by hand."""

from __future__ import annotations

import torch
from sgl_kernel.token_rows import fill_bonus_tokens_cpu, rotate_input_ids_cpu


def test_the_bonus_token_is_the_last_accepted() -> None:
    bonus = torch.zeros(2, dtype=torch.long)
    fill_bonus_tokens_cpu(torch.tensor([[11, 12, 13], [21, 22, 23]]), torch.tensor([2, 3]), bonus, 3)
    assert bonus.tolist() == [12, 23]


def test_rows_are_shifted_and_end_with_the_new_token() -> None:
    tokens = torch.tensor([1, 2, 3, 7, 8])
    rotate_input_ids_cpu(tokens, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[4], [9]]))
    assert tokens.tolist() == [2, 3, 4, 8, 9]


def test_a_place_can_be_given_for_the_new_token() -> None:
    tokens = torch.tensor([1, 2, 3, 7])
    rotate_input_ids_cpu(tokens, torch.tensor([0, 3]), torch.tensor([3, 1]), torch.tensor([4, 9]), torch.tensor([1, 3]))
    assert tokens.tolist() == [2, 4, 3, 9]
