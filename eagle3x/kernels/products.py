"""The matrix products of a training step, and the weights in the precision that they are made in.

Master weights keep their precision; a copy in that of the activations is made anew each step, with the weight of the
norm before it folded in. Gradients of weights are summed over all TTT steps in one product, in the masters' precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3x.kernels import kernels_for


def folded(parts: list[Tensor], gain: Tensor | None, like: Tensor) -> Tensor:
    """Matrices [O_j, H] below one another, times gain [H], in the precision and place of `like`."""
    result = like.new_empty(sum(len(part) for part in parts), parts[0].shape[1])
    kernels = kernels_for(like)
    for part, out in zip(parts, result.split([len(part) for part in parts]), strict=True):
        kernels.fold(part, gain, out)
    return result


def unfolded(d_folded: Tensor, parts: list[Tensor], gain: Tensor, like: Tensor) -> Tensor:
    """Turn the gradient of what `folded` made into the parts', in place; returns the gain's [H]."""
    kernels = kernels_for(like)
    pieces = d_folded.split([len(part) for part in parts])
    return torch.stack([kernels.unfold_(d, part, gain) for d, part in zip(pieces, parts, strict=True)]).sum(0)


def weight_gradient(d_output: Tensor, x: Tensor, out: Tensor) -> None:
    """out [O, H] = d_output [n, O]^T x [n, H], summed and written in the precision of `out`."""
    if out.dtype == x.dtype:
        torch.mm(d_output.T, x, out=out)
    elif x.is_cuda:
        torch.mm(d_output.T, x, out_dtype=out.dtype, out=out)
    else:
        torch.mm(d_output.T.to(out.dtype), x.to(out.dtype), out=out)


def add_weight_gradient(d_output: Tensor, x: Tensor, out: Tensor) -> None:
    """out [O, H] += d_output [n, O]^T x [n, H]."""
    if x.is_cuda and out.dtype != x.dtype:
        torch.addmm(out, d_output.T, x, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(d_output.T.to(out.dtype), x.to(out.dtype))


def wide_product(x: Tensor, matrix: Tensor) -> Tensor:
    """x [n, H] times matrix [O, H]^T, in float32 at least."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, matrix.T, out_dtype=torch.float32)
    return x @ matrix.T
