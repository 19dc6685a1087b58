"""What the fused kernels compute, in torch. In-place functions end in an underscore.

T rows of packed documents, R rows asked for, K TTT steps, H hidden size, I intermediate size, N query heads, G
key-value heads, d head size, D draft vocabulary, C rows that meet a head together, L labels among them.
W = (N + 2G) d: a row's queries, keys and values side by side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from eagle3x.kernels.eager_attention import attend, attend_backward, own_backward, shared_backward
from eagle3x.kernels.layout import Heads, Layout

__all__ = [
    "add_unit", "attend", "attend_backward", "fold", "own_backward", "rotate_", "shared_backward", "shifted_sum",
    "soft_cross_entropy_", "softmax", "swiglu", "swiglu_backward_", "unfold_", "unit", "unit_backward", "unit_rows",
    "unrotate_",
]  # fmt: skip


def unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [n, H] -> rows of root mean square 1, and what each was multiplied by [n]."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    return (wide * scale[:, None]).to(x.dtype), scale


def unit_rows(table: Tensor, index: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The rows `index` [n] of a table [V, H], brought to root mean square 1, in dtype."""
    return unit(F.embedding(index, table), eps)[0].to(dtype)


def add_unit(a: Tensor, b: Tensor, eps: float, out: Tensor) -> tuple[Tensor, Tensor]:
    """Write `unit` of a + b [n, H] to out; returns the sum and the scale."""
    total = a + b
    hat, scale = unit(total, eps)
    out.copy_(hat)
    return total, scale


def unit_backward(
    d_unit: Tensor, hat: Tensor, scale: Tensor, also: Tensor | None = None, add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient [n, H] of what `unit` read. also: a second part of d_unit. add: what is added to the result."""
    grad = d_unit if also is None else d_unit + also
    wide, hat = (x if x.dtype == torch.float64 else x.float() for x in (grad, hat))
    result = scale[:, None] * (wide - hat * (wide * hat).mean(-1, keepdim=True))
    out = torch.empty_like(d_unit) if out is None else out
    return out.copy_(result if add is None else result + add)


def rotate_(
    x: Tensor, from_tokens: Tensor, rows: Tensor | None, positions: Tensor, shift: int, angles: tuple[Tensor, Tensor],
    heads: Heads, part: str,
) -> None:  # fmt: skip
    """Add what the tokens contribute, then RoPE in Llama's half-split layout to queries and keys.

    x [n, .]: queries, keys and values of `part` "qkv", or "q", or "kv" alone, of the rows [n] (None: of all T). Row i
    reads token i + 1 + shift, whose part is from_tokens [T, W], at positions[i] + shift. Where there is no such token
    the last one stands in: the row is in no loss. angles: cosines and sines [positions, d/2].
    """
    first, last, rotated = _columns(heads, part)
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    x += from_tokens[(rows + 1 + shift).clamp_(max=len(from_tokens) - 1), first:last]
    _turn_(x[:, :rotated], positions[rows] + shift, angles, heads.size, 1)


def unrotate_(
    x: Tensor, rows: Tensor | None, positions: Tensor, shift: int, angles: tuple[Tensor, Tensor], heads: Heads,
    part: str,
) -> None:  # fmt: skip
    """The gradient of what `rotate_` read, from that of what it wrote."""
    at = positions if rows is None else positions[rows]
    _turn_(x[:, : _columns(heads, part)[2]], at + shift, angles, heads.size, -1)


def _columns(heads: Heads, part: str) -> tuple[int, int, int]:
    """First and last column of the part in a row of W, and how many of its columns are rotated."""
    q, k = heads.query_width, heads.key_width
    return {"qkv": (0, q + 2 * k, q + k), "q": (0, q, q), "kv": (q, q + 2 * k, k)}[part]


def _turn_(x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], size: int, sign: int) -> None:
    cos, sin = (table[positions.long(), None] for table in angles)
    a, b = x.unflatten(-1, (-1, size)).split(size // 2, dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    a32, b32, sin = a.to(wide), b.to(wide), sin * sign
    first, second = a32 * cos - b32 * sin, b32 * cos + a32 * sin
    a.copy_(first)
    b.copy_(second)


def shifted_sum(d_qkv: Tensor, d_shared: Tensor, layout: Layout, heads: Heads) -> Tensor:
    """Gradient [T, W] of what `rotate_` added: token i+1+k was read by row i of step k.

    d_qkv [K, R, W], of which step 0 has queries only; d_shared [T, 2Gd]: step 0's keys and values.
    """
    total, last = len(layout.slots), len(layout.slots) - 1
    result = d_qkv.new_zeros(total, heads.width)
    later = (layout.rows[None] + torch.arange(1, len(d_qkv) + 1, device=d_qkv.device)[:, None]).clamp_(max=last)
    queries = result[:, : heads.query_width]
    queries.index_add_(0, later[0], d_qkv[0, :, : heads.query_width])
    result.index_add_(0, later[1:].flatten(), d_qkv[1:].flatten(0, 1))
    result[1:, heads.query_width :] += d_shared[:-1]
    result[-1, heads.query_width :] += d_shared[-1]
    return result


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """[n, 2I] -> silu(gate) * up, written to out [n, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(F.silu(gate), up, out=out)


def swiglu_backward_(gate_up: Tensor, d_out: Tensor) -> None:
    """Turn what `swiglu` read [n, 2I] into its gradient. d_out: [n, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_up = d_out * silu
    gate.copy_(d_out * up * (sigmoid + silu * (1 - sigmoid)))
    up.copy_(d_up)


def softmax(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[L, D] -> probabilities [L, D] in dtype, and the most likely ids [L]."""
    return torch.softmax(logits, dim=-1).to(dtype), logits.argmax(-1)


def soft_cross_entropy_(z: Tensor, p: Tensor, best: Tensor, label: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """-sum_v p_v log softmax(z)_v [C] of each row, and whether its argmax is the target's [C].

    z [C, D] becomes the loss's gradient times scale [C]. p [L, D], best [L]: row label[i] of them teaches row i.
    """
    p = p[label]
    wide = torch.promote_types(z.dtype, torch.float32)
    logits, p = z.to(wide), p.to(wide)
    lse, mass = torch.logsumexp(logits, dim=-1, keepdim=True), p.sum(-1, keepdim=True)
    loss = (lse * mass)[:, 0] - (p * logits).sum(-1)
    right = logits.argmax(-1) == best[label]
    z.copy_((torch.exp(logits - lse) * mass).sub_(p).mul_(scale[:, None]))
    return loss, right


def fold(weight: Tensor, gain: Tensor | None, out: Tensor) -> None:
    """Write weight [O, H] * gain [H] to out: a norm's weight moves into the matrix that reads it."""
    if gain is None:
        out.copy_(weight)
    else:
        torch.mul(weight, gain, out=out)


def unfold_(d_folded: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
    """The folded matrix' gradient [O, H] becomes the matrix' own; returns the gain's [H]."""
    d_gain = (d_folded * weight).sum(0)
    d_folded *= gain
    return d_gain
