"""The Triton kernels against the same formulas in torch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="runs on a GPU, or with triton 3.6, numpy < 2.4 and TRITON_INTERPRET=1")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs on a GPU, or with TRITON_INTERPRET=1", allow_module_level=True)

from eagle3x.kernels import eager, fused
from eagle3x.kernels.layout import Heads, Layout, layout_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS, LENGTHS = 3, (150, 1, 5)
HEADS = Heads(queries=4, keys=2, size=16)
T = sum(LENGTHS)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def moved(layout: Layout) -> Layout:
    return layout.map(lambda x: x.to(DEVICE))


def some_rows() -> Layout:
    """Two ranges and single rows of the first document, so that blocks of queries are full, part and masked."""
    rows = torch.tensor([*range(3, 9), *range(12, 149), 150, 153, 154])
    return moved(layout_of(rows, LENGTHS))


def close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), rtol=tolerance, atol=tolerance)


def test_unit_and_its_gradient() -> None:
    a, b, d, also, add = (draw(5, 70, seed=i) for i in range(5))
    hat, scale = fused.unit(a, 1e-5)
    for got, want in zip((hat, scale), eager.unit(a, 1e-5), strict=True):
        close(got, want)
    mine, theirs = torch.empty_like(a), torch.empty_like(a)
    for got, want in zip(fused.add_unit(a, b, 1e-5, mine), eager.add_unit(a, b, 1e-5, theirs), strict=True):
        close(got, want)
    close(mine, theirs)
    for extra in ({}, {"also": also}, {"add": add}, {"also": also, "add": add}):
        close(fused.unit_backward(d, hat, scale, **extra), eager.unit_backward(d, hat, scale, **extra))
    index = torch.tensor([4, 0, 4], device=DEVICE)
    close(fused.unit_rows(a, index, 1e-5, torch.float32), eager.unit_rows(a, index, 1e-5, torch.float32))


@pytest.mark.parametrize("part", ["qkv", "q", "kv"])
def test_rotation_and_back(part: str) -> None:
    layout = some_rows()
    rows = None if part == "kv" else layout.rows
    width = {"qkv": HEADS.width, "q": HEADS.query_width, "kv": 2 * HEADS.key_width}[part]
    x = draw(T if rows is None else len(rows), width + 8)[:, :width]  # rows that lie apart
    turns = draw(200, HEADS.size // 2, seed=1)
    angles, tokens = (turns.cos(), turns.sin()), draw(T, HEADS.width, seed=2)
    mine, theirs = x.clone(), x.clone()
    fused.rotate_(mine, tokens, rows, layout.positions, 2, angles, HEADS, part)
    eager.rotate_(theirs, tokens, rows, layout.positions, 2, angles, HEADS, part)
    close(mine, theirs)
    fused.unrotate_(mine, rows, layout.positions, 2, angles, HEADS, part)
    eager.unrotate_(theirs, rows, layout.positions, 2, angles, HEADS, part)
    close(mine, theirs)


def test_gradient_of_what_tokens_contribute() -> None:
    layout = some_rows()
    d_qkv, d_shared = draw(STEPS, len(layout.rows), HEADS.width), draw(T, 2 * HEADS.key_width, seed=1)
    d_qkv[0, :, HEADS.query_width :] = float("nan")  # step 0 has queries only
    close(fused.shifted_sum(d_qkv, d_shared, layout, HEADS), eager.shifted_sum(d_qkv, d_shared, layout, HEADS))


def test_attention_and_its_gradients() -> None:
    layout = some_rows()
    rows = len(layout.rows)
    qkv, shared = draw(STEPS, rows, HEADS.width), draw(T, 2 * HEADS.key_width, seed=1)
    d_output = draw(STEPS, rows, HEADS.query_width, seed=2)
    results = []
    for kernels in (fused, eager):
        output, lse, delta, d_qkv = (torch.full(s, float("nan"), device=DEVICE) for s in (
            d_output.shape, (STEPS, rows, HEADS.queries), (STEPS, rows, HEADS.queries), qkv.shape))  # fmt: skip
        for step in range(STEPS):
            kernels.attend(qkv, step, shared, layout, HEADS, output, lse)
        for step in reversed(range(STEPS)):
            kernels.attend_backward(d_output, output, lse, qkv, step, shared, layout, HEADS, delta, d_qkv)
            if step:
                kernels.own_backward(d_output, lse, delta, qkv, step, HEADS, d_qkv)
        d_qkv[0, :, HEADS.query_width :] = 0.0
        d_shared = kernels.shared_backward(d_output, lse, delta, qkv, shared, layout, HEADS)
        results.append((output, lse, delta, d_qkv, d_shared))
    for got, want in zip(*results, strict=True):
        close(got, want)


def test_swiglu_and_its_gradient() -> None:
    gate_up, d_out = draw(3, 2 * 50), draw(3, 50, seed=1)
    mine, theirs = torch.empty(3, 50, device=DEVICE), torch.empty(3, 50, device=DEVICE)
    fused.swiglu(gate_up, mine)
    eager.swiglu(gate_up, theirs)
    close(mine, theirs)
    mine, theirs = gate_up.clone(), gate_up.clone()
    fused.swiglu_backward_(mine, d_out)
    eager.swiglu_backward_(theirs, d_out)
    close(mine, theirs)


def test_distributions_and_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3x.kernels.fused_loss.BLOCK", 64)  # several blocks, the last not full
    logits, z = 3 * draw(4, 150), 3 * draw(9, 150, seed=1)
    (p, best), (want, want_best) = fused.softmax(logits, torch.float32), eager.softmax(logits, torch.float32)
    close(p, want)
    assert torch.equal(best, want_best)
    label, scale = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3], device=DEVICE), draw(9, seed=2).double()
    z[4, :] = 100 * logits[1]  # agrees with its label
    mine, theirs = z.clone(), z.clone()
    loss, right = fused.soft_cross_entropy_(mine, p, best, label, scale)
    want_loss, want_right = eager.soft_cross_entropy_(theirs, p, best, label, scale)
    close(loss, want_loss)
    close(mine, theirs)
    assert right.tolist() == want_right.tolist()
    assert right[4]


def test_folding_a_norm_into_a_matrix_and_back() -> None:
    weight, gain = draw(300, 80)[:, 10:], draw(70, seed=1)
    mine, theirs = torch.empty(300, 70, device=DEVICE), torch.empty(300, 70, device=DEVICE)
    for given in (gain, None):
        fused.fold(weight, given, mine)
        eager.fold(weight, given, theirs)
        close(mine, theirs)
    d = draw(300, 90, seed=2)[:, 20:]
    mine, theirs = d.clone(), d.clone()
    close(fused.unfold_(mine, weight, gain), eager.unfold_(theirs, weight, gain), 1e-4)
    close(mine, theirs)
