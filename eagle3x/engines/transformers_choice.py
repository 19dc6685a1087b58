"""The next token: greedy, or sampled by temperature and top-p with one uniform number per token."""

from __future__ import annotations

import torch
from torch import Tensor

HEAD = 256
"""Most nuclei fit into this many tokens; taking them is ten times as fast as sorting a whole vocabulary."""


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax of [..., V] (the first of equals), and its distance to the second best logit (float32)."""
    best, ids = logits.max(dim=-1)
    others = logits.scatter(-1, ids[..., None], float("-inf"))
    return ids, best.float() - others.amax(dim=-1).float()


def sample(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Token ids [B]: invert the cumulative distribution of each row's nucleus at `uniform_B` in [0, 1).

    The nucleus is the smallest set of most probable tokens with a mass of at least top_p (Holtzman et al. 2020,
    arXiv:1904.09751). The result depends on the row alone.
    """
    probs_BV = (logits_BV.float() / temperature_B[:, None].float()).softmax(dim=-1)
    width = min(HEAD, probs_BV.shape[1])
    head_BW, ids_BW = probs_BV.topk(width, dim=-1)
    all_B = probs_BV.sum(dim=-1, dtype=torch.float64)
    chosen_B = ids_BW.gather(1, _invert(head_BW, top_p_B, uniform_B, all_B))
    if width < probs_BV.shape[1]:
        reach_B = head_BW.sum(dim=-1, dtype=torch.float64)
        # The mass of all tokens is known before they are sorted, so only draws from behind the head need that.
        wide_B = torch.where(top_p_B < 1, reach_B < top_p_B, uniform_B.double() * all_B >= reach_B)
        if wide_B.any():
            sorted_RV, ids_RV = probs_BV[wide_B].sort(dim=-1, descending=True)
            rank_R1 = _invert(sorted_RV, top_p_B[wide_B], uniform_B[wide_B], all_B[wide_B])
            chosen_B[wide_B] = ids_RV.gather(1, rank_R1)
    return chosen_B[:, 0]


def _invert(sorted_BW: Tensor, top_p_B: Tensor, uniform_B: Tensor, all_B: Tensor) -> Tensor:
    """Rank [B, 1] of the token in which the cumulative mass passes uniform x (mass of the nucleus).

    all_B: mass of all tokens, which is the nucleus at a top_p of 1.
    """
    after_BW = sorted_BW.double().cumsum(dim=-1)
    inside_BW = (after_BW - sorted_BW) < top_p_B[:, None]
    mass_BW = (sorted_BW * inside_BW).double().cumsum(dim=-1)
    nucleus_B = torch.where(top_p_B < 1, mass_BW[:, -1], all_B)
    wanted_B1 = (uniform_B.double() * nucleus_B)[:, None]
    last_B1 = inside_BW.sum(dim=-1, keepdim=True) - 1
    return torch.searchsorted(mass_BW, wanted_B1, right=True).minimum(last_B1)
