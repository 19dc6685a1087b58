"""The chunked loss against the formula written out in float64, and rows that must not matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3x.drafters.losses import Teacher, pairs_of, ttt_loss
from eagle3x.kernels.layout import layout_of

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
    x: dict[str, Tensor], keep: Tensor, teacher: Teacher, weights: list[float], chunk: int
) -> tuple[Tensor, Tensor]:
    """`ttt_loss` of the rows that are kept at any step."""
    asked = keep.any(0)
    layout = layout_of(torch.nonzero(asked)[:, 0], [T])
    pairs = pairs_of(keep, layout.slots, weights, chunk)
    states = x["states"][: len(weights), asked]
    loss, sums = ttt_loss(states, x["head"], x["gain"], pairs, x["last"][pairs.labels], teacher)
    return loss, sums


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
            q = torch.exp(x["head"] @ (x["gain"] * x["states"][step, i]))
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
    learning = [x[name].requires_grad_(True) for name in ("states", "head", "gain")]
    wanted, per_step = written_out(x, weights, pre_norm)
    wanted_grads = torch.autograd.grad(3 * wanted, learning)
    teacher = Teacher(x["target"], x["norm"], 1e-5, "pre_norm" if pre_norm else "post_norm")
    loss, sums = loss_of(x, x["keep"], teacher, weights, chunk)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close((sums[0] / x["keep"].sum(1)).tolist(), per_step, rtol=1e-12, atol=0)
    for got, want in zip(torch.autograd.grad(3 * loss, learning), wanted_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_accuracy_counts_rows_whose_argmax_is_the_targets() -> None:
    # Target: position j says token j % 3, and teaches row j - 1: the rows should say 1, 2, 0, 1.
    target = Teacher(torch.eye(3), torch.ones(3), 1e-5, "post_norm")
    last = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1])]
    layout = layout_of(torch.arange(4), [5])
    pairs = pairs_of(torch.tensor([[True, True, True, True, False]]), layout.slots, [1.0], 2)
    for said, right in (([0, 1, 1, 0], 0), ([1, 2, 1, 0], 2)):
        states = torch.eye(3)[None, torch.tensor(said)] * 5
        _, sums = ttt_loss(states, torch.eye(3), torch.ones(3), pairs, last[pairs.labels], target)
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
