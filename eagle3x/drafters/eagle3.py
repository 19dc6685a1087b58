"""The EAGLE-3 drafter: one Llama block over fused boundaries of the target, with a head over the draft vocabulary.

Row p of a sample reads the target's states at position p and token p+1, sits at RoPE position p, and predicts token
p+2. Norm placement and the state handed to the next draft step follow vLLM's and SGLang's `llama_eagle3.py`.

Shapes: T rows of packed documents, R rows asked for, B sequences, S rows of a call, H hidden size, D draft vocabulary,
A boundaries of target hidden size Ht, N heads, G key-value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.rope import inverse_frequencies
from eagle3x.drafters.ttt import Weights, ttt
from eagle3x.kernels.layout import Layout


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, as in transformers' Llama."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last axis."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections over [normed embedding; normed hidden state] (2H wide), grouped-query heads, RoPE."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.head_dim, self.theta = arch.head_dim, arch.rope_theta
        self.scaled = None if arch.rope_scaling is None else inverse_frequencies(arch)
        self._frequencies: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.q_proj = nn.Linear(2 * arch.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * arch.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * arch.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, arch.hidden_size, bias=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frequencies": {}}  # another process works them out on its own device

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """[..., 2H] -> rotated [..., N, d]."""
        return self._rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), positions)

    def key(self, x: Tensor, positions: Tensor) -> Tensor:
        """[..., 2H] -> rotated [..., G, d]."""
        return self._rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), positions)

    def value(self, x: Tensor) -> Tensor:
        """[..., 2H] -> [..., G, d]."""
        return self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE in Llama's half-split layout; angles in float32 at least."""
        cos, sin = self.turns(positions, x.dtype)
        cos, sin = cos[..., None, :], sin[..., None, :]
        a, b = x.to(cos.dtype).split(self.head_dim // 2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., d/2] of positions [...], as scaled RoPE multiplies them."""
        wide, device = torch.promote_types(dtype, torch.float32), positions.device
        if (device, wide) not in self._frequencies:
            half = self.head_dim // 2
            plain = self.theta ** -(torch.arange(half, dtype=wide, device=device) / half)
            self._frequencies[device, wide] = plain if self.scaled is None else self.scaled[0].to(device, wide)
        angles = positions.to(wide)[..., None] * self._frequencies[device, wide]
        scale = 1.0 if self.scaled is None else self.scaled[1]
        return angles.cos() * scale, angles.sin() * scale


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """The one decoder block. Its parts are named as in the checkpoint; `Eagle3` joins them."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.hidden_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(arch)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = MLP(arch)
        self.norm_before_residual = arch.norm_before_residual

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] twice -> what attention reads [..., 2H], and the residual [..., H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat([self.input_layernorm(embedding), normed], dim=-1), residual

    def outputs(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Heads [..., N, d] and residual [..., H] -> the stream after the block [..., H]."""
        stream = residual + self.self_attn.o_proj(attended.flatten(-2))
        return stream + self.mlp(self.post_attention_layernorm(stream))


@dataclass
class DraftCache:
    """Rotated keys and values by slot = position. key, value: [B, G, max_length, d]."""

    key: Tensor
    value: Tensor


class Eagle3(nn.Module):
    """The drafter. Parameters and buffers are named as in a `LlamaForCausalLMEagle3` checkpoint."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        fused = arch.num_aux * arch.target_hidden_size
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size).requires_grad_(False)
        self.fc = nn.Linear(fused, arch.hidden_size, bias=False)
        self.input_norm = RMSNorm(fused, arch.rms_norm_eps) if arch.norm_before_fc else None
        norms = [RMSNorm(arch.target_hidden_size, arch.rms_norm_eps) for _ in range(arch.num_aux)]
        self.fc_norm = nn.ModuleList(norms) if arch.fc_norm else None
        self.midlayer = Block(arch)
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.lm_head = nn.Linear(arch.hidden_size, arch.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(arch.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(arch.vocab_size) < arch.draft_vocab_size)

    def fc_input(self, aux: Tensor) -> Tensor:
        """States of the boundaries [..., A*Ht], normed as the variant says: what fc reads."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(self.arch.num_aux, dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return aux

    def fuse(self, aux: Tensor) -> Tensor:
        """States of the boundaries [..., A*Ht] -> the hidden state that the block reads [..., H]."""
        return self.fc(self.fc_input(aux))

    def ttt(self, aux_TF: Tensor, token_ids_T: Tensor, layout: Layout, steps: int) -> Tensor:
        """Training-time test over packed documents: the state of each step, before the final norm's weight.

        Step k at row i reads the state of step k-1 (step 0: the fused `aux_TF[i]`) and token i+1+k, and predicts token
        i+2+k. It attends to step 0's keys of rows <= i and to its own keys of steps 1..k; query and own key sit at i+k.
        Rows whose token i+1+k is past the document's end are not valid. Only the layout's rows are worked out; the
        others lend their step-0 keys.

        Computes in the precision of aux_TF. Returns [K, R, H], of root mean square 1: see `unit_logits`.
        """
        if not len(aux_TF) == len(token_ids_T) == len(layout.slots):
            raise ValueError(f"{len(aux_TF)} states, {len(token_ids_T)} tokens, {len(layout.slots)} rows")
        norms = [self.input_norm] if self.input_norm is not None else self.fc_norm
        attention, mlp, block = self.midlayer.self_attn, self.midlayer.mlp, self.midlayer
        weights = Weights(
            fc=self.fc.weight,
            fc_gain=None if norms is None else torch.cat([cast(RMSNorm, norm).weight for norm in norms]),
            q=attention.q_proj.weight,
            k=attention.k_proj.weight,
            v=attention.v_proj.weight,
            o=attention.o_proj.weight,
            gate=mlp.gate_proj.weight,
            up=mlp.up_proj.weight,
            down=mlp.down_proj.weight,
            input_norm=block.input_layernorm.weight,
            hidden_norm=block.hidden_norm.weight,
            post_norm=block.post_attention_layernorm.weight,
            final_norm=self.norm.weight,
        )
        positions = torch.arange(layout.longest + steps, device=aux_TF.device)
        turns = attention.turns(positions, aux_TF.dtype)
        return ttt(aux_TF, token_ids_T, layout, steps, self.arch, turns, self.embed_tokens.weight, weights)

    def unit_logits(self, unit: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., D] of a state [..., H] that `ttt` returned."""
        return self.lm_head(unit * self.norm.weight)

    def logits(self, state: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., D] of a state [..., H] that `step` returned."""
        return self.lm_head(state if self.arch.norm_output else self.norm(state))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary -> ids of the target's."""
        return draft_ids + self.d2t[draft_ids]

    def target_ids(self) -> Tensor:
        """The target id of each draft id, [D]."""
        return self.to_target_ids(torch.arange(self.arch.draft_vocab_size, device=self.d2t.device))

    def new_cache(self, batch: int, max_length: int) -> DraftCache:
        """An empty cache for positions 0..max_length-1."""
        shape = (batch, self.arch.num_kv_heads, max_length, self.arch.head_dim)
        weight = self.fc.weight
        return DraftCache(weight.new_zeros(shape), weight.new_zeros(shape))

    def step(self, hidden_BSH: Tensor, token_ids_BS: Tensor, positions_BS: Tensor, cache: DraftCache) -> Tensor:
        """Draft: run S rows for each of B sequences and return the states [B, S, H] for `logits` and the next step.

        A row writes its key and value at slot = position and attends to slots 0..position, so what draft steps wrote
        is overwritten by the next verify step's rows. Ragged rows are padded at their end with ascending positions.
        """
        attention = self.midlayer.self_attn
        x, residual = self.midlayer.inputs(self.embed_tokens(token_ids_BS), hidden_BSH)
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        cache.key[batch, :, positions_BS] = attention.key(x, positions_BS)
        cache.value[batch, :, positions_BS] = attention.value(x)
        length = int(positions_BS.max()) + 1
        visible = torch.arange(length, device=x.device) <= positions_BS[:, None, :, None]
        query = attention.query(x, positions_BS).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            query, cache.key[:, :, :length], cache.value[:, :, :length], attn_mask=visible, enable_gqa=True
        )
        stream = self.midlayer.outputs(attended.transpose(1, 2), residual)
        return self.norm(stream) if self.arch.norm_output else stream
