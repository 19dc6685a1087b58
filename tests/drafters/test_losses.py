"""The chunked loss against the formula written out in float64, and rows that must not matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3x.drafters.losses import Teacher, ttt_loss

T, H, D, STEPS = 9, 6, 5, 3


def inputs() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    keep = torch.rand(STEPS, T, generator=g) < 0.6
    for step in range(STEPS):
        keep[step, T - 1 - step :] = False
    return {
        "states": draw(STEPS, T, H), "head": draw(D, H), "last": draw(T, H), "target": draw(D, H),
        "norm": draw(H), "keep": keep,
    }  # fmt: skip


def written_out(x: dict[str, Tensor], weights: list[float], pre_norm: bool) -> tuple[Tensor, list[float]]:
    """Sum over steps of w_k / sum(w) * mean over kept rows of -sum_v p_v log q_v."""
    per_step = []
    for step in range(STEPS):
        rows = []
        for i in range(T):
            if not x["keep"][step, i]:
                continue
            label = x["last"][i + 1 + step]
            if pre_norm:
                label = label / torch.sqrt((label * label).mean() + 1e-5) * x["norm"]
            p = torch.exp(x["target"] @ label)
            q = torch.exp(x["head"] @ x["states"][step, i])
            rows.append(-(p / p.sum() * torch.log(q / q.sum())).sum())
        per_step.append(torch.stack(rows).mean())
    total = sum(w * loss for w, loss in zip(weights, per_step, strict=True)) / sum(weights)
    assert isinstance(total, Tensor)
    return total, [float(loss.detach()) for loss in per_step]


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_loss_and_gradients_are_those_of_the_formula(chunk: int, pre_norm: bool) -> None:
    x = inputs()
    weights = [1.0, 0.5, 0.25]
    x["states"].requires_grad_(True)
    x["head"].requires_grad_(True)
    wanted, per_step = written_out(x, weights, pre_norm)
    wanted_grads = torch.autograd.grad(3 * wanted, [x["states"], x["head"]])
    rows = torch.nonzero(x["keep"].any(0))[:, 0]
    teacher = Teacher(x["target"], x["norm"], 1e-5, "pre_norm" if pre_norm else "post_norm")
    states = [x["states"][step, rows] for step in range(STEPS)]
    loss, stats = ttt_loss(states, x["head"], rows, x["keep"], x["last"], teacher, weights, chunk)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(stats.loss.tolist(), per_step, rtol=1e-12, atol=0)
    assert stats.rows.tolist() == x["keep"].sum(1).tolist()
    for got, want in zip(torch.autograd.grad(3 * loss, [x["states"], x["head"]]), wanted_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_accuracy_counts_rows_whose_argmax_is_the_targets() -> None:
    # Target: position j says token j % 3. The drafter says 0, 1, 1, 0.
    target = Teacher(torch.eye(3), torch.ones(3), 1e-5, "post_norm")
    last = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1])]
    said = torch.eye(3)[torch.tensor([0, 1, 1, 0])] * 5
    keep = torch.tensor([[True, True, True, True, False]])
    # Rows 0..3 are taught by positions 1..4: tokens 1, 2, 0, 1. None is right but nothing else is either.
    _, stats = ttt_loss([said], torch.eye(3), torch.arange(4), keep, last, target, [1.0], 2)
    assert stats.accuracy.tolist() == [0.0]
    said = torch.eye(3)[torch.tensor([1, 2, 1, 0])] * 5
    _, stats = ttt_loss([said], torch.eye(3), torch.arange(4), keep, last, target, [1.0], 2)
    assert stats.accuracy.tolist() == [0.5]


def test_a_step_without_rows_weighs_nothing_and_a_batch_without_rows_is_an_error() -> None:
    x = inputs()
    teacher = Teacher(x["target"], x["norm"], 1e-5, "post_norm")
    only_first = x["keep"].clone()
    only_first[1:] = False
    rows = torch.arange(T)
    both, _ = ttt_loss([x["states"][0], x["states"][1]], x["head"], rows, only_first[:2], x["last"], teacher, [1, 9], 4)
    first, _ = ttt_loss([x["states"][0]], x["head"], rows, only_first[:1], x["last"], teacher, [1], 4)
    assert float(both) == pytest.approx(float(first), rel=1e-12)
    with pytest.raises(ValueError, match="no row"):
        ttt_loss([x["states"][0]], x["head"], rows, torch.zeros(1, T, dtype=torch.bool), x["last"], teacher, [1], 4)


def test_argmax_in_chunks() -> None:
    teacher = Teacher(torch.eye(4), torch.ones(4), 1e-5, "post_norm")
    last = torch.eye(4)[torch.tensor([3, 1, 2, 0, 3])]
    assert teacher.argmax(last, 2).tolist() == [3, 1, 2, 0, 3]
    assert teacher.argmax(last[:0], 2).tolist() == []
