"""The chunked loss against the formula written out in float64, and rows that must not matter."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from eagle3x.drafters.losses import Teacher, pairs_of, ttt_loss
from eagle3x.kernels.acceptance import log_acceptance_, total_variation_
from eagle3x.kernels.layout import layout_of
from eagle3x.training.config import Loss

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
        "norm": draw(H), "gain": draw(H), "keep": keep,
    }  # fmt: skip


def loss_of(
    x: dict[str, Tensor],
    keep: Tensor,
    teacher: Teacher,
    weights: list[float],
    chunk: int,
    name: Loss = "cross_entropy",
) -> tuple[Tensor, Tensor]:
    """`ttt_loss` of the rows that are kept at any step."""
    asked = keep.any(0)
    layout = layout_of(torch.nonzero(asked)[:, 0], [T])
    pairs = pairs_of(keep, layout.slots, weights, chunk)
    states = x["states"][: len(weights), asked]
    loss, sums = ttt_loss(states, x["head"], x["gain"], pairs, x["last"][pairs.labels], teacher, name)
    return loss, sums


def of_a_row(p: Tensor, q: Tensor, name: Loss) -> Tensor:
    """The formula, one token of the vocabulary after the other."""
    if name == "cross_entropy":
        return -sum((p[v] * torch.log(q[v]) for v in range(D)), torch.zeros((), dtype=p.dtype))
    alpha = sum((p[v] if p[v] < q[v] else q[v] for v in range(D)), torch.zeros((), dtype=p.dtype))
    return 1 - alpha if name == "total_variation" else -torch.log(alpha)


def written_out(x: dict[str, Tensor], weights: list[float], pre_norm: bool, name: Loss) -> tuple[Tensor, list[float]]:
    """Sum over steps of w_k / sum(w) * mean over kept rows of a row's loss."""
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
            q = torch.exp(x["head"] @ (x["gain"] * x["states"][step, i]))
            rows.append(of_a_row(p / p.sum(), q / q.sum(), name))
        per_step.append(torch.stack(rows).mean())
    total = sum(w * loss for w, loss in zip(weights, per_step, strict=True)) / sum(weights)
    assert isinstance(total, Tensor)
    return total, [float(loss.detach()) for loss in per_step]


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("name", get_args(Loss))
def test_loss_and_gradients_are_those_of_the_formula(chunk: int, pre_norm: bool, name: Loss) -> None:
    x = inputs()
    weights = [1.0, 0.5, 0.25]
    learning = [x[name].requires_grad_(True) for name in ("states", "head", "gain")]
    wanted, per_step = written_out(x, weights, pre_norm, name)
    wanted_grads = torch.autograd.grad(3 * wanted, learning)
    teacher = Teacher(x["target"], x["norm"], 1e-5, "pre_norm" if pre_norm else "post_norm")
    loss, sums = loss_of(x, x["keep"], teacher, weights, chunk, name)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close((sums[0] / x["keep"].sum(1)).tolist(), per_step, rtol=1e-12, atol=0)
    for got, want in zip(torch.autograd.grad(3 * loss, learning), wanted_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("loss", "wanted"), [(total_variation_, 0.5), (log_acceptance_, math.log(2))])
def test_acceptance_losses_by_hand(loss: Any, wanted: float) -> None:
    # p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2): alpha = 1/2. q lies below p at the first two, whose mass is 1/2, so that
    # the gradient of -alpha is q * 1/2 - (1/4, 1/4, 0) = (-1/8, -1/8, 1/4); that of -log alpha is twice as much.
    z, p = torch.tensor([[0.0, 0.0, math.log(2)]]), torch.tensor([[0.5, 0.5, 0.0]])
    found, right = loss(z, p, torch.tensor([1]), torch.tensor([0]), torch.tensor([3.0]))
    torch.testing.assert_close(found, torch.tensor([wanted]))
    times = 3 / 0.5 if loss is log_acceptance_ else 3
    torch.testing.assert_close(z, times * torch.tensor([[-0.125, -0.125, 0.25]]))
    assert right.tolist() == [False]  # it says 2, the target 1


@pytest.mark.parametrize("loss", [total_variation_, log_acceptance_])
def test_acceptance_losses_where_nothing_overlaps_and_where_all_does(loss: Any) -> None:
    z, p = torch.tensor([[200.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    found, _ = loss(z, p, torch.tensor([1, 0]), torch.tensor([0, 1]), torch.ones(2))
    assert torch.isfinite(found).all()
    assert torch.isfinite(z).all()
    assert found[0] >= 1
    assert (found[1], z[1].tolist()) == (0, [0, 0])


@pytest.mark.parametrize("loss", [total_variation_, log_acceptance_])
def test_acceptance_losses_of_bfloat16_logits_are_computed_in_float32(loss: Any) -> None:
    g = torch.Generator().manual_seed(1)
    z = torch.randn(7, 50, generator=g).bfloat16()
    p = torch.randn(3, 50, generator=g).softmax(-1).bfloat16()
    label, best, scale = torch.tensor([0, 0, 1, 1, 2, 2, 2]), p.argmax(-1), torch.rand(7, generator=g)
    mine, wide = z.clone(), z.float()
    found, _ = loss(mine, p, best, label, scale)
    want, _ = loss(wide, p.float(), best, label, scale)
    assert found.dtype == torch.float32
    assert torch.equal(found, want)
    assert torch.equal(mine, wide.bfloat16())


def test_accuracy_counts_rows_whose_argmax_is_the_targets() -> None:
    # Target: position j says token j % 3, and teaches row j - 1: the rows should say 1, 2, 0, 1.
    target = Teacher(torch.eye(3), torch.ones(3), 1e-5, "post_norm")
    last = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1])]
    layout = layout_of(torch.arange(4), [5])
    pairs = pairs_of(torch.tensor([[True, True, True, True, False]]), layout.slots, [1.0], 2)
    for said, right in (([0, 1, 1, 0], 0), ([1, 2, 1, 0], 2)):
        states = torch.eye(3)[None, torch.tensor(said)] * 5
        _, sums = ttt_loss(states, torch.eye(3), torch.ones(3), pairs, last[pairs.labels], target, "cross_entropy")
        assert sums[1].tolist() == [right]


def test_pairs_lie_by_label_and_chunks_keep_labels_whole() -> None:
    # Rows 1 and 2 at step 0, row 1 at step 1: positions 2 and 3 teach rows 1 and 2, position 3 teaches row 1 of step 1.
    keep = torch.tensor([[False, True, True, False], [False, True, False, False]])
    pairs = pairs_of(keep, torch.tensor([-1, 0, 1, -1]), [1.0, 0.5], 2)
    assert pairs.labels.tolist() == [2, 3]
    assert pairs.label.tolist() == [0, 1, 1]
    assert pairs.step.tolist() == [0, 0, 1]
    assert pairs.row.tolist() == [0, 1, 2]  # step * R + slot
    assert pairs.scale.tolist() == pytest.approx([1 / 1.5 / 2, 1 / 1.5 / 2, 0.5 / 1.5], rel=1e-15)
    assert pairs.chunks == ((1, 1), (2, 3))
    assert pairs_of(keep, torch.tensor([-1, 0, 1, -1]), [1.0, 0.5], 3).chunks == ((2, 3),)
    shared = pairs_of(keep, torch.tensor([-1, 0, 1, -1]), [1.0, 0.5], 2, counts=(5, 2), times=3)  # 3 + 1 are elsewhere
    assert shared.scale.tolist() == pytest.approx([3 / 1.5 / 5, 3 / 1.5 / 5, 3 * 0.5 / 1.5 / 2], rel=1e-15)


def test_a_step_without_rows_weighs_nothing_and_a_batch_without_rows_is_an_error() -> None:
    x = inputs()
    teacher = Teacher(x["target"], x["norm"], 1e-5, "post_norm")
    only_first = x["keep"].clone()
    only_first[1:] = False
    both, _ = loss_of(x, only_first[:2], teacher, [1, 9], 4)
    first, _ = loss_of(x, only_first[:1], teacher, [1], 4)
    assert float(both) == pytest.approx(float(first), rel=1e-12)
    with pytest.raises(ValueError, match="no row"):
        pairs_of(torch.zeros(1, T, dtype=torch.bool), torch.arange(T), [1.0], 4)


def test_a_head_that_does_not_learn_gets_no_gradient_and_gives_the_same() -> None:
    x = inputs()
    teacher = Teacher(x["target"], x["norm"], 1e-5, "post_norm")
    x["states"].requires_grad_(True)
    frozen, _ = loss_of(x, x["keep"], teacher, [1.0] * STEPS, 4)
    (d_frozen,) = torch.autograd.grad(frozen, [x["states"]])
    x["head"].requires_grad_(True)
    trained, _ = loss_of(x, x["keep"], teacher, [1.0] * STEPS, 4)
    assert torch.equal(torch.autograd.grad(trained, [x["states"]])[0], d_frozen)


def test_argmax_in_chunks() -> None:
    teacher = Teacher(torch.eye(4), torch.ones(4), 1e-5, "post_norm")
    last = torch.eye(4)[torch.tensor([3, 1, 2, 0, 3])]
    assert teacher.argmax(last, 2).tolist() == [3, 1, 2, 0, 3]
    assert teacher.argmax(last[:0], 2).tolist() == []
