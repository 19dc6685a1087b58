"""Losses of what speculative sampling accepts, in torch alone: on a GPU too, where soft cross-entropy has a kernel.

alpha = sum_v min(p_v, q_v) is the chance that a draft drawn from q is accepted by a target with distribution p
(Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5 and corollary 3.6). Each function is called as
`eager.soft_cross_entropy_`, and holds as many tensors [C, D].
"""

from __future__ import annotations

import torch
from torch import Tensor


def total_variation_(z: Tensor, p: Tensor, best: Tensor, label: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """1 - alpha [C] of each row with q = softmax(z), and whether its argmax is the target's [C].

    z [C, D] becomes the loss's gradient times scale [C]. p [L, D], best [L]: row label[i] of them teaches row i.
    """
    right = z.argmax(-1) == best[label]
    alpha, gradient = _overlap(z, p[label])
    z.copy_(gradient.mul_(scale[:, None]))
    return 1 - alpha, right


def log_acceptance_(z: Tensor, p: Tensor, best: Tensor, label: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """-log alpha [C], as `total_variation_`: its gradient, divided by alpha, does not vanish where little is accepted.

    Samarin et al. 2026, "LK Losses", arXiv:2602.23881. (Their blend with KL weighs by alpha of a whole batch, which a
    chunk does not know.)
    """
    right = z.argmax(-1) == best[label]
    alpha, gradient = _overlap(z, p[label])
    alpha.clamp_(min=torch.finfo(alpha.dtype).tiny)
    z.copy_(gradient.mul_((scale / alpha)[:, None]))
    return -torch.log(alpha), right


def _overlap(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """alpha [C] of p [C, D] and q = softmax(z), and the gradient [C, D] of -alpha, float32 at least.

    d alpha / d z_v = q_v ([q_v < p_v] - sum_u q_u [q_u < p_u]), for min(p, q) moves with q only where q is less.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    q, p = torch.softmax(z.to(wide), dim=-1), p.to(wide)
    alpha = torch.minimum(p, q).sum(-1)
    below = q * (q < p)
    return alpha, q.mul_(below.sum(-1, keepdim=True)).sub_(below)
