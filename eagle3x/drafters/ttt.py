"""The training-time test (TTT) of packed documents, forward and backward, written out.

Autograd would make and add what need not be: K gradients of every weight, and the embedding's half of K products. Here
- the embedding's half of queries, keys and values is one product for all steps, since row i of step k reads what row
  i+k of step 0 reads. Its gradient is the sum over steps; nothing is multiplied back into the frozen embedding;
- a norm's weight is folded into the matrix that reads the norm, and its gradient falls out of the matrix' own;
- what a weight reads, and what comes back to it, lie side by side for all steps: its gradient is one product.

Shapes: T rows of packed documents, R rows asked for, K TTT steps, H hidden size, F what fc reads, I intermediate size,
W values of a row's queries, keys and values, Q of its queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3x.drafters.architecture import Architecture
from eagle3x.kernels import kernels_for
from eagle3x.kernels.layout import Heads, Layout
from eagle3x.kernels.products import add_weight_gradient, folded, unfolded, weight_gradient


@dataclass(frozen=True)
class Weights:
    """The trained matrices [out, in] and norms, as in the checkpoint. fc_gain [F]: the norms before fc, if any."""

    fc: Tensor
    fc_gain: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    input_norm: Tensor
    hidden_norm: Tensor
    post_norm: Tensor
    final_norm: Tensor


def ttt(
    aux: Tensor, token_ids: Tensor, layout: Layout, steps: int, arch: Architecture, turns: tuple[Tensor, Tensor],
    embedding: Tensor, weights: Weights,
) -> Tensor:  # fmt: skip
    """The state of each step before the final norm's weight: root mean square 1, [K, R, H].

    aux [T, F], in the precision of the computation. token_ids [T]. turns: RoPE's cosines and sines [positions, d/2],
    K more than the longest document has. embedding [V, H]: frozen.
    """
    return _Ttt.apply(aux, token_ids, layout, steps, arch, turns, embedding, *vars(weights).values())  # type: ignore[return-value]


class _Pass:
    """What forward and backward share: the weights as the products read them, and what the forward leaves behind."""

    def __init__(
        self, like: Tensor, layout: Layout, steps: int, arch: Architecture, turns: tuple[Tensor, Tensor], w: Weights
    ) -> None:
        self.layout, self.steps, self.arch, self.kernels = layout, steps, arch, kernels_for(like)
        self.heads = Heads(arch.num_heads, arch.num_kv_heads, arch.head_dim)
        self.gains = {n: g.to(like.dtype) for n, g in (("hidden", w.hidden_norm), ("final", w.final_norm))}
        H = arch.hidden_size
        self.fc = folded([w.fc], w.fc_gain, like)
        self.embedded = folded([x[:, :H] for x in (w.q, w.k, w.v)], w.input_norm, like)
        self.hidden = folded([x[:, H:] for x in (w.q, w.k, w.v)], w.hidden_norm, like)
        self.out, self.down = folded([w.o], None, like), folded([w.down], None, like)
        self.gate_up = folded([w.gate, w.up], w.post_norm, like)
        self.turns = turns

    def forward(self, aux: Tensor, token_ids: Tensor, embedding: Tensor) -> Tensor:
        arch, heads, kernels, layout, eps = self.arch, self.heads, self.kernels, self.layout, self.arch.rms_norm_eps
        steps, R, Q = self.steps, len(layout.rows), heads.query_width
        self.fc_hat = self._fc_hat(aux)
        fused = self.fc_hat @ self.fc.T
        self.entry, self.entry_scale = kernels.unit(fused, eps)
        self.token_hat = kernels.unit_rows(embedding, token_ids, eps, aux.dtype)
        from_tokens = self.token_hat @ self.embedded.T
        self.shared = self.entry @ self.hidden[Q:].T
        kernels.rotate_(self.shared, from_tokens, None, layout.positions, 0, self.turns, heads, "kv")

        def stack(*width: int) -> Tensor:
            return aux.new_empty(steps, R, *width)

        self.states, self.post = stack(arch.hidden_size), stack(arch.hidden_size)
        self.qkv, self.attended = stack(heads.width), stack(Q)
        self.gate_up_out, self.activations = stack(2 * arch.intermediate_size), stack(arch.intermediate_size)
        self.lse = self.entry_scale.new_empty(steps, R, heads.queries)
        self.read = stack(arch.hidden_size) if arch.norm_output else self.states
        self.read_scales, self.post_scales, self.scales = [], [], []
        residual = fused[layout.rows]
        hat = self.row_entry = self.entry[layout.rows]
        for step in range(steps):
            if arch.norm_before_residual:
                residual = hat * self.gains["hidden"]
            part, columns = ("q", slice(Q)) if step == 0 else ("qkv", slice(None))
            qkv = self.qkv[step, :, columns]
            torch.mm(hat, self.hidden[columns].T, out=qkv)
            kernels.rotate_(qkv, from_tokens, layout.rows, layout.positions, step, self.turns, heads, part)
            kernels.attend(self.qkv, step, self.shared, layout, heads, self.attended, self.lse)
            stream, scale = kernels.add_unit(residual, self.attended[step] @ self.out.T, eps, self.post[step])
            self.post_scales.append(scale)
            torch.mm(self.post[step], self.gate_up.T, out=self.gate_up_out[step])
            kernels.swiglu(self.gate_up_out[step], self.activations[step])
            residual, scale = kernels.add_unit(
                stream, self.activations[step] @ self.down.T, eps, hat := self.states[step]
            )
            self.scales.append(scale)
            if arch.norm_output:
                residual = hat * self.gains["final"]
                hat, scale = kernels.unit(residual, eps)
                self.read[step] = hat
            self.read_scales.append(scale)
        return self.states.detach()  # another tensor than the one kept here: kept outputs would keep their graph

    def backward(self, d_states: Tensor, w: Weights) -> Weights:
        """Gradients of the weights; uses up what the forward left."""
        arch, heads, kernels, layout = self.arch, self.heads, self.kernels, self.layout
        Q = heads.query_width
        d_output, d_stream = torch.empty_like(self.post), torch.empty_like(self.post)
        d_attended, d_qkv, delta = (
            torch.empty_like(self.attended),
            torch.empty_like(self.qkv),
            torch.empty_like(self.lse),
        )
        d_hidden_norm, d_final_norm = (torch.zeros_like(g) for g in (w.hidden_norm, w.final_norm))
        carried_hat: Tensor | None = None  # what the next step gives back to the normed state that it reads
        carried: Tensor | None = None  # and to its residual
        for step in reversed(range(self.steps)):
            if arch.norm_before_residual and carried_hat is not None and carried is not None:
                d_hidden_norm += (carried * self.read[step]).sum(0)
                carried_hat, carried = carried_hat + carried * self.gains["hidden"], None
            if arch.norm_output and carried_hat is not None:
                d_normed = kernels.unit_backward(carried_hat, self.read[step], self.read_scales[step], add=carried)
                d_final_norm += (d_normed * self.states[step]).sum(0)
                carried_hat, carried = d_normed * self.gains["final"], None
            kernels.unit_backward(
                d_states[step], self.states[step], self.scales[step], carried_hat, carried, out=d_output[step]
            )
            kernels.swiglu_backward_(self.gate_up_out[step], d_output[step] @ self.down)
            d_post = self.gate_up_out[step] @ self.gate_up
            kernels.unit_backward(
                d_post, self.post[step], self.post_scales[step], add=d_output[step], out=d_stream[step]
            )
            torch.mm(d_stream[step], self.out, out=d_attended[step])
            kernels.attend_backward(
                d_attended, self.attended, self.lse, self.qkv, step, self.shared, layout, heads, delta, d_qkv
            )
            if step > 0:
                kernels.own_backward(d_attended, self.lse, delta, self.qkv, step, heads, d_qkv)
            part, columns = ("q", slice(Q)) if step == 0 else ("qkv", slice(None))
            d_read = d_qkv[step, :, columns]
            kernels.unrotate_(d_read, layout.rows, layout.positions, step, self.turns, heads, part)
            carried_hat, carried = d_read @ self.hidden[columns], d_stream[step]
        assert carried_hat is not None, "there is at least one step"
        assert carried is not None
        d_shared = kernels.shared_backward(d_attended, self.lse, delta, self.qkv, self.shared, layout, heads)
        kernels.unrotate_(d_shared, None, layout.positions, 0, self.turns, heads, "kv")
        d_entry = d_shared @ self.hidden[Q:]
        if arch.norm_before_residual:
            d_hidden_norm += (carried * self.row_entry).sum(0)
            carried_hat += carried * self.gains["hidden"]
        d_entry.index_add_(0, layout.rows, carried_hat)
        d_fused = kernels.unit_backward(d_entry, self.entry, self.entry_scale)
        if not arch.norm_before_residual:
            d_fused.index_add_(0, layout.rows, carried)
        d_tokens = kernels.shifted_sum(d_qkv, d_shared, layout, heads)
        return self._weight_gradients(
            w, d_fused, d_tokens, d_qkv, d_shared, d_stream, d_output, d_hidden_norm, d_final_norm
        )

    def _weight_gradients(
        self, w: Weights, d_fused: Tensor, d_tokens: Tensor, d_qkv: Tensor, d_shared: Tensor, d_stream: Tensor,
        d_down_out: Tensor, d_hidden_norm: Tensor, d_final_norm: Tensor,
    ) -> Weights:  # fmt: skip
        """One product for each matrix, over all steps."""
        H, Q, W = self.arch.hidden_size, self.heads.query_width, self.heads.width

        def product(d_output: Tensor, x: Tensor, like: Tensor) -> Tensor:
            out = like.new_empty(d_output.shape[-1], x.shape[-1])
            weight_gradient(d_output.flatten(0, -2), x.flatten(0, -2), out)
            return out

        fc = product(d_fused, self.fc_hat, w.fc)
        fc_gain = None if w.fc_gain is None else unfolded(fc, [w.fc], w.fc_gain, d_fused)
        o, down = product(d_stream, self.attended, w.o), product(d_down_out, self.activations, w.down)
        gate_up = product(self.gate_up_out, self.post, w.gate)
        post_norm = unfolded(gate_up, [w.gate, w.up], w.post_norm, d_fused)
        qkv = w.q.new_empty(W, 2 * H)
        weight_gradient(d_tokens, self.token_hat, qkv[:, :H])
        hidden = qkv[:, H:]
        weight_gradient(d_shared, self.entry, hidden[Q:])
        weight_gradient(d_qkv[0, :, :Q], self.row_entry, hidden[:Q])
        if self.steps > 1:
            add_weight_gradient(d_qkv[1:].flatten(0, 1), self.read[:-1].flatten(0, 1), hidden)
        parts = [w.q, w.k, w.v]
        input_norm = unfolded(qkv[:, :H], [x[:, :H] for x in parts], w.input_norm, d_fused)
        d_hidden_norm += unfolded(hidden, [x[:, H:] for x in parts], w.hidden_norm, d_fused)
        q, k, v = qkv.split([len(x) for x in parts])
        gate, up = gate_up.chunk(2)
        return Weights(fc, fc_gain, q, k, v, o, gate, up, down, input_norm, d_hidden_norm, post_norm, d_final_norm)

    def _fc_hat(self, aux: Tensor) -> Tensor:
        """What fc reads, before the weights of its norms."""
        if not (self.arch.norm_before_fc or self.arch.fc_norm):
            return aux
        parts = self.arch.num_aux if self.arch.fc_norm else 1
        rows = aux.reshape(len(aux) * parts, -1)
        return self.kernels.unit(rows, self.arch.rms_norm_eps)[0].view_as(aux)


class _Ttt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, aux: Tensor, token_ids: Tensor, layout: Layout, steps: int, arch: Architecture,
        turns: tuple[Tensor, Tensor], embedding: Tensor, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        run = _Pass(aux, layout, steps, arch, turns, Weights(*weights))
        states = run.forward(aux, token_ids, embedding)
        if any(ctx.needs_input_grad):
            ctx.run = run
            ctx.save_for_backward(*weights)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        run: _Pass = ctx.run
        del ctx.run
        weights = run.backward(grads[0], Weights(*ctx.saved_tensors))
        return *(None,) * 7, *vars(weights).values()
