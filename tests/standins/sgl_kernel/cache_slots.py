"""Which slots of the KV pool the tokens of a request lie in.

`req_to_token` [R, P] is the table: entry [r, i] is the slot of token i of pool row r. B requests use the rows
`req_pool_indices` [B]. Tensors named `out_*`, and the table where it says so, are written in place.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Enter new slots into the table: request b's tokens start[b] .. end[b]-1 get the next ones of `out_cache_loc`."""
    _require_width(req_to_token, pool_len)
    taken = 0
    for row, first, last in _ranges(req_pool_indices, start, end):
        req_to_token[row, first:last] = out_cache_loc[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read the table: the slots of request b's tokens start[b] .. end[b]-1, one request after the other."""
    _require_width(req_to_token, pool_len)
    taken = 0
    for row, first, last in _ranges(req_pool_indices, start, end):
        out_cache_loc[taken : taken + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        taken += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Read the table: each request's topk * num_cols slots past its seq_lens[b] tokens, one request after the other."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_cols, out_cache_loc, pool_len
    )


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the slots of accepted tokens to the front of `accept_out_cache_loc`; -1 in `accept_index` is none."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: slots.numel()] = slots.to(accept_out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """A table for drafting, [B * topk, pool_len]: row b*topk+k is branch k of request b.

    It holds the request's seq_lens[b] slots, then the num_steps slots that the branch drafts into, which in
    `req_to_token` follow the request's tokens branch after branch. The rest is 0.
    """
    table = torch.zeros(seq_lens.numel() * topk, pool_len, dtype=req_to_token.dtype)
    for index, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            own = req_to_token[row, length + branch * num_steps :][: min(num_steps, pool_len - length)]
            branch_row = table[index * topk + branch]
            branch_row[:length] = req_to_token[row, :length]
            branch_row[length : length + own.numel()] = own
    return table


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move slots `src_loc` to `tgt_loc` in every buffer; the two may overlap.

    data_ptrs: addresses of the buffers' first bytes; strides: bytes of a slot in each.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        read = [ctypes.string_at(address + slot * size, size) for slot in sources]
        for slot, content in zip(targets, read, strict=True):
            ctypes.memmove(address + slot * size, content, size)


def _ranges(rows: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), start.tolist(), end.tolist(), strict=True))


def _require_width(req_to_token: Tensor, pool_len: int) -> None:
    if req_to_token.shape[1] != pool_len:
        raise ValueError(f"the table has {req_to_token.shape[1]} columns, not {pool_len}")
