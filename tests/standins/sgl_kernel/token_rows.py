"""Tokens of several requests, flattened row after row."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Write each request's last accepted token, the target's own, to `bonus_tokens` [B].

    accept_tokens [B * accept_stride]; accept_lens [B] counts the bonus token.
    """
    rows = torch.arange(accept_lens.numel()) * accept_stride
    bonus_tokens.copy_(accept_tokens.flatten()[rows + accept_lens.long() - 1])


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one, in place, and put its new token last (or at `select_index`).

    input_ids [T]; extend_start_loc and extend_seq_lens [B] say where each request's tokens lie; topk_index [B].
    """
    places = [None] * extend_seq_lens.numel() if select_index is None else select_index.tolist()
    new = topk_index.flatten().tolist()
    for start, length, token, place in zip(
        extend_start_loc.tolist(), extend_seq_lens.tolist(), new, places, strict=True
    ):
        if length == 0:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        input_ids[end - 1 if place is None else place] = token
