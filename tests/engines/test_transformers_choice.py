"""Greedy choice and sampling against hand-made distributions."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

import pytest
import torch

from eagle3x.engines.transformers_choice import greedy, sample


def test_greedy_and_its_gap() -> None:
    ids, gaps = greedy(torch.tensor([[1.0, 4.0, 2.5], [3.0, 0.0, 3.0]]))
    assert ids.tolist() == [1, 0]  # the first of equals
    assert gaps.tolist() == [1.5, 0.0]


def drawn(probabilities: list[float], uniforms: list[float], temperature: float = 1.0, top_p: float = 1.0) -> list[int]:
    rows = len(uniforms)
    logits = torch.tensor(probabilities).log().expand(rows, -1)
    options = torch.full((rows,), temperature), torch.full((rows,), top_p)
    return sample(logits, *options, torch.tensor(uniforms, dtype=torch.float64)).tolist()


def test_inverse_of_the_cumulative_distribution() -> None:
    # Most probable first: token 2 up to 0.6, token 0 up to 0.9, token 1 above.
    assert drawn([0.3, 0.1, 0.6], [0.0, 0.599, 0.601, 0.899, 0.901, 0.9999]) == [2, 2, 0, 0, 1, 1]


def test_nucleus_is_renormalised() -> None:
    # top_p 0.8 keeps 0.6 and 0.3: token 2 up to 2/3, token 0 above, token 1 never.
    assert drawn([0.3, 0.1, 0.6], [0.66, 0.67, 0.9999], top_p=0.8) == [2, 0, 0]
    assert drawn([0.3, 0.1, 0.6], [0.9999], top_p=0.5) == [2]


def test_temperature() -> None:
    # p^(1/0.5) of (0.2, 0.8) is (0.04, 0.64): token 1 up to 16/17 = 0.941.
    assert drawn([0.2, 0.8], [0.94, 0.942], temperature=0.5) == [1, 0]


def test_wide_nuclei_reach_past_the_head_of_the_vocabulary() -> None:
    # 1000 equal tokens: the nucleus of 0.9 has 900 of them, and each must be reachable.
    uniforms = [(i + 0.5) / 1800 for i in range(1800)]
    chosen = torch.tensor(drawn([0.001] * 1000, uniforms, top_p=0.9))
    counts = chosen.bincount(minlength=1000)
    assert (counts > 0).sum() in (900, 901)  # the sum of 900 rounded thousandths may stay below 0.9


def test_rows_do_not_influence_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 500) * 3
    options = torch.linspace(0.5, 2, 7), torch.linspace(0.3, 1, 7), torch.linspace(0, 0.999, 7, dtype=torch.float64)
    together = sample(logits, *options)
    alone = [sample(logits[i : i + 1], *(o[i : i + 1] for o in options)).item() for i in range(7)]
    assert together.tolist() == alone


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_frequencies(top_p: float) -> None:
    probabilities = [0.05, 0.15, 0.5, 0.3]
    kept = [0.05, 0.15, 0.5, 0.3] if top_p == 1 else [0, 0, 0.5, 0.3]
    uniforms = torch.rand(40000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    counts = torch.tensor(drawn(probabilities, uniforms, top_p=top_p)).bincount(minlength=4) / 40000
    for share, p in zip(counts.tolist(), kept, strict=True):
        expected = p / sum(kept)
        assert abs(share - expected) <= 4.5 * math.sqrt(expected * (1 - expected) / 40000)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_the_head_of_the_vocabulary_gives_what_sorting_all_of_it_gives(top_p: float, sharpness: float) -> None:
    """2,000 tokens, of which the head is an eighth: draws from both sides of its border."""
    torch.manual_seed(0)
    logits = torch.randn(300, 2000) * sharpness
    uniforms = torch.rand(300, dtype=torch.float64)
    expected = []
    for row, uniform in zip(logits.softmax(dim=-1).tolist(), uniforms.tolist(), strict=True):
        ranked = sorted(range(2000), key=row.__getitem__, reverse=True)
        mass = list(accumulate(row[i] for i in ranked))
        size = min(2000, bisect_left(mass, top_p) + 1)
        expected.append(ranked[bisect_right(mass[:size], uniform * mass[size - 1])])
    chosen = sample(logits, torch.ones(300), torch.full((300,), top_p), uniforms).tolist()
    assert chosen == expected
