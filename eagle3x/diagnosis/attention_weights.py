"""Other layouts that a drafter's attention may have been written in, as changes of its projections' weights.

Shapes: N heads of size d, H hidden size of the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERY, KEY, VALUE = (f"midlayer.self_attn.{name}_proj.weight" for name in ("q", "k", "v"))


def other_inputs(weight: Tensor) -> Tensor:
    """[N*d, 2H]: for what reads [hidden state; embedding], where engines give [embedding; hidden state]."""
    return torch.cat([*reversed(weight.chunk(2, dim=1))], dim=1)


def to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """[N*d, 2H]: rotary pairs that are neighbours, rows 2i and 2i+1 of a head, moved to its rows i and i + d/2.

    It is `permute` of transformers' convert_llama_weights_to_hf.py; done twice it is a fault.
    """
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `to_halves`."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
