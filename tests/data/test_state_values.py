"""Finiteness and norms of captured states, against torch in float64."""

from __future__ import annotations

import pytest
import torch

from eagle3x.data.state_values import BLOCK, all_finite, row_norms

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(dtype: torch.dtype) -> torch.Tensor:
    """[T, 3, 64], a part of something larger, of more than two blocks."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2 * BLOCK // 192 + 77, 4, 64, generator=generator) * 50
    whole[5] = 0
    return whole.to(dtype)[:, 1:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_those_of_float64(dtype: torch.dtype) -> None:
    found = torch.from_numpy(row_norms(rows(dtype)))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), rows(dtype).double().norm(dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0, 0), (700, 1, 33), (-1, 2, 63)], ids=str)
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(
    dtype: torch.dtype, bad: float, place: tuple[int, int, int]
) -> None:
    states = rows(dtype)
    assert all_finite(states)
    states[place] = bad
    assert not all_finite(states)
    assert not torch.isfinite(torch.from_numpy(row_norms(states))).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_smallest_values_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    states = torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=dtype).view(1, 1, 4)
    assert all_finite(states)
    assert all_finite(states[:0])


def test_a_row_of_ones_has_the_root_of_its_length() -> None:
    assert row_norms(torch.ones(2, 1, 49, dtype=torch.bfloat16)).tolist() == [[7.0], [7.0]]
