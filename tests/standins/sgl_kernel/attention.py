"""Attention over a paged KV pool: the two operators that SGLang's `intel_amx` backend calls.

Shapes: B requests, T query tokens of all requests, H query heads, G key/value heads, D and E their dims, S slots of the
pool, P longest request that the pool's table holds. `req_to_token[r, i]` is the slot of token i of pool row r.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAMESPACE = "sgl_kernel"
DECODE = (
    "decode_attention_cpu(Tensor query, Tensor(a!) key_buffer, Tensor(b!) value_buffer, float key_scale,"
    " float value_scale, Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits,"
    " Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap,"
    " bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
EXTEND = (
    "extend_attention_cpu(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, Tensor key_buffer,"
    " Tensor value_buffer, float key_scale, float value_scale, Tensor req_to_token, Tensor req_pool_indices,"
    " Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_extend_len, float sm_scale,"
    " float logit_cap, bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks,"
    " Tensor? tree_mask, bool is_causal) -> ()"
)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, visible: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Softmax attention in float32 of each request's queries over its own slots; [B, t, H, E].

    Args:
        query: [B, t, H, D].
        keys: [S, G, D], the pool.
        values: [S, G, E], the pool.
        slots: [B, L], where each request's tokens lie; entries that no query sees may hold anything.
        visible: bool [B, t, L], which of them each query sees: at least one.
        scale: factor of the products.
        sinks: [H], what each head's softmax weighs besides, to read nothing there.
    """
    # An unseen entry may name a slot that was never written: its NaN would survive a weight of 0.
    seen = visible.any(dim=1)
    first = slots.gather(1, seen.int().argmax(dim=1, keepdim=True))
    slots = torch.where(seen, slots, first).long()
    q_BHtD, k_BGLD, v_BGLE = (x.float().transpose(1, 2) for x in (query, keys[slots], values[slots]))
    mask = visible.unsqueeze(1)
    if sinks is None:
        output = scaled_dot_product_attention(q_BHtD, k_BGLD, v_BGLE, attn_mask=mask, scale=scale, enable_gqa=True)
        return output.transpose(1, 2)
    heads = q_BHtD.shape[1] // k_BGLD.shape[1]
    k_BHLD, v_BHLE = (x.repeat_interleave(heads, dim=1) for x in (k_BGLD, v_BGLE))
    scores = (q_BHtD @ k_BHLD.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ v_BHLE).transpose(1, 2)


def decode_attention_cpu(
    query: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One query token per request; its key and value, if given, are first written to slots `loc`.

    query [B, H, D]; key [B, G*D]; value [B, G*E]; output [B, H, E] is written; seq_lens [B] counts the query's token. A
    token sees the last `sliding_window` tokens with itself, or all if that is 0.
    """
    _refuse(key_buffer, key_scale, value_scale, logit_cap, is_cross_attn, encoder_lens)
    if key is not None and value is not None:
        key_buffer[loc] = key.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[loc] = value.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    longest = int(seq_lens.max())
    place = torch.arange(longest)
    visible = place < seq_lens[:, None]
    if sliding_window > 0:
        visible &= place >= seq_lens[:, None] - sliding_window
    slots = req_to_token[req_pool_indices, :longest]
    output.copy_(attend(query[:, None], key_buffer, value_buffer, slots, visible[:, None], sm_scale, sinks)[:, 0])


def extend_attention_cpu(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_extend_len: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """The last `extend_seq_lens[b]` tokens of each request, whose keys and values are in the pool already.

    query [T, H, D] and output [T, H, E] hold request b's tokens from row `extend_start_loc[b]`. With a `tree_mask`
    (flat, request after request e*e, e its new tokens) query i sees all tokens before the new ones, and new token j
    where mask[i, j]; without it a query sees what is not after it, or everything if not `is_causal`. Of that it
    sees what is less than `sliding_window` tokens before it, if that is not 0.

    Latent attention keeps other things in its pool than the keys [T, H*D] and values [T, H*E] of whole prompts, which
    it gives here: then these are read, and no token may lie before the new ones.
    """
    _refuse(key_buffer, key_scale, value_scale, logit_cap, is_cross_attn, encoder_lens)
    if tree_mask is not None and sliding_window > 0:
        raise NotImplementedError("the stand-in for SGLang's CPU kernels has no trees in a sliding window")
    if key is not None and value is not None and query.shape[-1] != key_buffer.shape[-1]:
        if not torch.equal(seq_lens, extend_seq_lens.to(seq_lens.dtype)):
            raise NotImplementedError("the stand-in for SGLang's CPU kernels has no prefix for keys outside the pool")
        key_buffer = key.reshape(len(query), -1, query.shape[-1])
        value_buffer = value.reshape(len(query), -1, output.shape[-1])
        req_to_token = extend_start_loc[:, None] + torch.arange(int(seq_lens.max()))
        req_pool_indices = torch.arange(len(seq_lens))
    news, starts = extend_seq_lens.tolist(), extend_start_loc.tolist()
    everyone = list(range(len(news)))
    # Verification extends all requests by as many tokens: one call then, not one per request.
    for group in [everyone] if len(set(news)) == 1 else [[request] for request in everyone]:
        new, first = news[group[0]], group[0]
        if tree_mask is not None:
            mask_from = sum(n * n for n in news[:first])
            among_new = tree_mask.view(-1)[mask_from : mask_from + len(group) * new * new].view(-1, new, new).bool()
        else:
            among_new = torch.ones(1, new, new, dtype=torch.bool)
            among_new = among_new.tril() if is_causal else among_new
        totals = seq_lens[group]
        slots = req_to_token[req_pool_indices[group], : int(totals.max())]
        rows = slice(starts[first], starts[first] + len(group) * new)
        attended = attend(
            query[rows].unflatten(0, (len(group), new)),
            key_buffer,
            value_buffer,
            slots,
            _visible(among_new, totals, new, slots.shape[1], sliding_window),
            sm_scale,
            sinks,
        )
        output[rows] = attended.flatten(0, 1).to(output.dtype)


def _visible(among_new: Tensor, totals: Tensor, new: int, width: int, window: int) -> Tensor:
    """[B, new, width] of [B or 1, new, new]: all tokens before a request's new ones, and the new ones that it says.

    Of these the last `window` up to the query itself, if that is not 0.
    """
    offset = torch.arange(width) - (totals - new)[:, None, None]  # place among the new tokens, [B, 1, width]
    places = offset.clamp(0, new - 1).expand(-1, new, -1)
    chosen = among_new.expand(len(totals), -1, -1).gather(2, places)
    visible = (offset < 0) | ((offset < new) & chosen)
    return visible & (offset > torch.arange(new)[:, None] - window) if window > 0 else visible


def register() -> None:
    """Define both as operators of `torch.ops.sgl_kernel`, once per process."""
    for schema, function in ((DECODE, decode_attention_cpu), (EXTEND, extend_attention_cpu)):
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.split("(", maxsplit=1)[0], function, "CPU")


def _refuse(
    key_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    encoder_lens: Tensor | None,
) -> None:
    unsupported = {
        "an fp8 KV cache": key_buffer.dtype.itemsize < 2,
        "scaled keys or values": key_scale != 1 or value_scale != 1,
        "a cap on logits": logit_cap > 0,
        "cross attention": is_cross_attn or encoder_lens is not None,
    }
    if found := [what for what, asked in unsupported.items() if asked]:
        raise NotImplementedError(f"the stand-in for SGLang's CPU kernels has no {' or '.join(found)}")


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
