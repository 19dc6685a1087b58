"""The drafter that training starts from: the best linear drafter of the training states, in closed form.

The final norm's input at position p+1 is regressed (ridge, see `RIDGE`) on what row p reads, the boundaries at p and
the embedding of token p+1:

    y[p+1]  =  W_a aux[p]  +  W_e norm(embedding[p+1])

W_a becomes `fc`, so that the residual is its prediction. W_e must pass through attention, whose values have
G * head_dim dimensions: it is cut to that rank in the metric of its predictions (reduced-rank regression, Izenman
1975) and split into `v_proj` and `o_proj`. Queries and keys are one constant direction, found by regressing 1 on what
attention reads, laid into the fastest RoPE pairs: a row then looks at itself and hardly at its neighbours. The MLP
adds nothing yet (`down_proj` is zero); head and final norm are the target's.

T tokens, n rows, A boundaries, H hidden size, F = A*H + H features, G key-value heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.targets import Target
from eagle3x.training.packing import Document, keep_rows
from eagle3x.types import EagleError, LastNorm

RIDGE = 0.1
"""Added to the features' second moments, each of which is scaled to 1."""
SELF_SCORE = 30.0
"""Attention logit of a row's own key; a neighbour's is about 3 lower, the next one's 10."""
LOCAL_PAIRS = 10 / 64
"""RoPE pairs, of the head size, that queries and keys lie in: the fastest ones tell neighbours apart."""
MAX_ROWS = 65536
"""More rows would not change the regression by anything that training does not change more."""
INIT_STD = 0.02


@torch.no_grad()
def random_start(drafter: Eagle3, target: Target) -> None:
    """Weights drawn from torch's generator; only the embedding is the target's."""
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        elif name != "embed_tokens.weight":
            parameter.normal_(std=INIT_STD)
    drafter.embed_tokens.weight.copy_(target.embedding())


@torch.no_grad()
def warm_start(drafter: Eagle3, target: Target, documents: Sequence[Document], last_norm: LastNorm) -> None:
    """Set all weights as the module's text says; `documents` carry the states that the drafter will be trained on.

    Computes on the drafter's device. Raises EagleError if no row of the documents is in the loss, or the drafter is not
    as wide as the target.
    """
    arch, final_norm = drafter.arch, target.final_norm().to(drafter.fc.weight.device)
    if (arch.hidden_size, arch.target_hidden_size) != (target.hidden_size, target.hidden_size):
        raise EagleError(f"drafter.init=warm_start needs a drafter that is {target.hidden_size} wide, as the target")
    random_start(drafter, target)
    drafter.lm_head.weight.copy_(target.head()[drafter.target_ids().cpu()])
    drafter.norm.weight.copy_(final_norm)
    drafter.midlayer.mlp.down_proj.weight.zero_()

    moments: Tensor | None = None
    cross: Tensor | None = None
    rows = 0
    for aux, embedding, wanted in _regression_rows(drafter, documents, final_norm, last_norm):
        x = torch.cat([aux, embedding], dim=-1)
        moments = (x.T @ x).double() + (0 if moments is None else moments)
        cross = (x.T @ wanted).double() + (0 if cross is None else cross)
        rows += len(x)
    if moments is None or cross is None:
        raise EagleError("no row of the training states is in the loss: nothing to start the drafter from")
    weights = _ridge(moments / rows, cross / rows)
    fused = arch.num_aux * arch.hidden_size
    drafter.fc.weight.copy_(weights[:fused].T)
    _embedding_through_attention(drafter, weights[fused:], moments[fused:, fused:] / rows)
    _look_at_itself(drafter, documents, final_norm, last_norm)


def _regression_rows(
    drafter: Eagle3, documents: Sequence[Document], final_norm: Tensor, last_norm: LastNorm
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each document's kept rows: what fc reads [n, A*H], normed embeddings [n, H], wanted states [n, H].

    The wanted state is the target's, normed but not yet multiplied by the final norm's weight.
    """
    device, eps = drafter.fc.weight.device, drafter.arch.rms_norm_eps
    done = 0
    for document in documents:
        index = torch.nonzero(keep_rows(document.loss_mask, 1)[0])[:, 0]
        if len(index) == 0:
            continue
        last = document.last[index + 1].to(device).float()
        if last_norm == "post_norm":
            wanted = torch.where(final_norm.abs() > 1e-6, last / final_norm, 0.0)
        else:
            wanted = _normed(last, eps)
        embedding = drafter.embed_tokens(document.token_ids[index + 1].to(device))
        yield drafter.fc_input(document.aux[index].to(device).float()), _normed(embedding, eps), wanted
        done += len(index)
        if done >= MAX_ROWS:
            return


def _embedding_through_attention(drafter: Eagle3, weights: Tensor, moments: Tensor) -> None:
    """Write W_e [H, H] into v_proj and o_proj, at the rank that they have. moments: [H, H] of the embeddings."""
    arch, attention = drafter.arch, drafter.midlayer.self_attn
    rank = min(arch.num_kv_heads * arch.head_dim, arch.hidden_size)
    predicted = weights.T @ moments @ weights  # second moments of the predictions, [H, H]
    basis = torch.linalg.eigh(predicted).eigenvectors.flip(-1)[:, :rank]  # [H, rank], the largest first
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank, : arch.hidden_size] = (weights @ basis).T.to(attention.v_proj.weight.dtype)
    attention.o_proj.weight.zero_()
    per_group = arch.num_heads // arch.num_kv_heads
    for head in range(arch.num_heads):
        part = basis[:, (head // per_group) * arch.head_dim :][:, : arch.head_dim] / per_group
        attention.o_proj.weight[:, head * arch.head_dim :][:, : part.shape[1]] = part.to(basis.dtype)


def _look_at_itself(drafter: Eagle3, documents: Sequence[Document], final_norm: Tensor, last_norm: LastNorm) -> None:
    """Queries and keys that are the same for every row, so that RoPE alone tells positions apart."""
    arch, attention = drafter.arch, drafter.midlayer.self_attn
    moments = torch.zeros(2 * arch.hidden_size, 2 * arch.hidden_size, dtype=torch.float64, device=drafter.d2t.device)
    sums = torch.zeros(2 * arch.hidden_size, 1, dtype=torch.float64, device=drafter.d2t.device)
    rows = 0
    for aux, embedding, _ in _regression_rows(drafter, documents, final_norm, last_norm):
        x = torch.cat([embedding, _normed(drafter.fc(aux), arch.rms_norm_eps)], dim=-1)
        moments += (x.T @ x).double()
        sums += x.double().sum(0)[:, None]
        rows += len(x)
    constant = _ridge(moments / rows, sums / rows, ridge=1e-4)[:, 0]
    pairs = max(1, round(LOCAL_PAIRS * arch.head_dim))
    direction = torch.zeros(arch.head_dim, device=constant.device)
    direction[:pairs] = math.sqrt(SELF_SCORE * math.sqrt(arch.head_dim) / pairs)
    head = torch.outer(direction, constant.to(direction.dtype))
    attention.q_proj.weight.copy_(head.repeat(arch.num_heads, 1))
    attention.k_proj.weight.copy_(head.repeat(arch.num_kv_heads, 1))


def _ridge(moments: Tensor, cross: Tensor, ridge: float = RIDGE) -> Tensor:
    """[F, F] and [F, O] means over rows -> weights [F, O], shrunk as if every feature had mean square 1. Float64."""
    scale = moments.diagonal().sqrt().clamp(min=1e-12)
    scaled = moments / scale[:, None] / scale[None, :]
    scaled.diagonal().add_(ridge)
    return torch.linalg.solve(scaled, cross / scale[:, None]) / scale[:, None]


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
