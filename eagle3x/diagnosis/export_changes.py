"""In what the served checkpoint differs from the trained one: tensor by tensor, key by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3x.diagnosis.attention_weights import KEY, QUERY, VALUE, other_inputs, to_halves, to_neighbours
from eagle3x.diagnosis.causes import Kind
from eagle3x.drafters.checkpoint import EMBEDDING, UNRELATED, Published

if TYPE_CHECKING:
    from eagle3x.targets import Target

CONFIG: dict[str, Kind] = {
    "norm_before_residual": "norm_variant",
    "norm_before_fc": "norm_variant",
    "fc_norm": "norm_variant",
    "norm_output": "norm_variant",
    "rms_norm_eps": "norm_variant",
    "rope_theta": "rope_base",
    "rope_scaling": "rope_base",
}
FC = "fc.weight"
KNOWN = {"d2t", "t2d", EMBEDDING}
"""Tensors that have a comparison of their own."""
ROUNDING = 2**-7
"""Relative difference of a tensor that was stored in 16 bits."""
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {"side by side": to_neighbours, "half a head apart": to_halves}
MOST_LISTED = 4
"""Tensors that are named of those that no other kind explains."""


@dataclass(frozen=True)
class Change:
    """One difference, and what it is called if it costs acceptance."""

    kind: Kind
    sentence: str


def changes(trained: Published, served: Published, target: Target) -> list[Change]:
    """Every difference between the two checkpoints, layer ids apart: those are the engine's business."""
    columns, attention = _columns(trained, served), _attention(trained, served)
    embedding = _embedding(trained, served, target, fc_explained=bool(columns))
    if embedding is not None and embedding.kind == "other_target":
        return [embedding]
    found = [*_config(trained, served), *_vocabulary(trained, served), *columns, *attention]
    found += [] if embedding is None else [embedding]
    explained = {*([FC] if columns else []), *((QUERY, KEY, VALUE) if attention else ())}
    if said := _others(trained.tensors, served.tensors, explained):
        more = f"; and {len(said) - MOST_LISTED} others" if len(said) > MOST_LISTED else ""
        found.append(Change("export_changed", "; ".join(said[:MOST_LISTED]) + more))
    return found


def _config(trained: Published, served: Published) -> list[Change]:
    found = []
    for key, kind in CONFIG.items():
        before, after = getattr(trained.arch, key), getattr(served.arch, key)
        if before != after:
            found.append(Change(kind, f"config.json says {key}={after}, trained was {key}={before}"))
    if served.arch.max_position_embeddings < trained.arch.max_position_embeddings:
        found.append(
            Change(
                "max_positions",
                f"max_position_embeddings={served.arch.max_position_embeddings}, trained with"
                f" {trained.arch.max_position_embeddings}",
            )
        )
    return found


def _vocabulary(trained: Published, served: Published) -> list[Change]:
    before, after = _target_ids(trained), _target_ids(served)
    if before.shape == after.shape and torch.equal(before, after):
        return []
    if before.shape != after.shape:
        return [Change("stale_vocabulary", f"the draft vocabulary has {len(after)} tokens, trained were {len(before)}")]
    same = float((before == after).float().mean())
    if torch.equal(after, torch.arange(len(after))):
        return [Change("d2t_missing", "d2t is zero everywhere: a draft id is taken for the target's id")]
    for by in (1, -1):
        if torch.equal(after.roll(by), before):
            return [Change("d2t_shifted", f"d2t is shifted: row i holds the token of row i{by:+d}")]
    return [Change("stale_vocabulary", f"d2t is another vocabulary's: {same:.0%} of its tokens are in their row")]


def _target_ids(published: Published) -> Tensor:
    """[D]; a checkpoint without the map means the ids themselves."""
    size = published.arch.draft_vocab_size
    offsets = published.tensors.get("d2t")
    return torch.arange(size) + (0 if offsets is None else offsets.long())


def _embedding(trained: Published, served: Published, target: Target, fc_explained: bool) -> Change | None:
    own, its = _embedding_of(trained, target), _embedding_of(served, target)
    if _same(own, its):
        return None
    if (by := _rows_off(own, its)) is not None:
        return Change(
            "random_embedding", f"embed_tokens is off by {by:+d} rows: its row i is the trained row i{-by:+d}"
        )
    likeness = float(torch.nn.functional.cosine_similarity(own.float(), its.float(), dim=1).median())
    fused, other = trained.tensors[FC], served.tensors[FC]
    if likeness < UNRELATED and not fc_explained and other.any() and _unrelated(fused, other):
        said = f"embed_tokens and fc are another drafter's (median cosine of the embeddings {likeness:.2f})"
        return Change("other_target", said)
    return Change("random_embedding", f"embed_tokens is another one: median cosine {likeness:.2f} to the trained one")


def _embedding_of(published: Published, target: Target) -> Tensor:
    own = published.tensors.get(EMBEDDING)
    return target.embedding() if own is None else own


def _rows_off(own: Tensor, its: Tensor) -> int | None:
    """By how many rows `own` [V, H] was moved on to become `its`, the rows that fell off apart; None if it was not."""
    if own.shape != its.shape:
        return None
    row = len(its) // 2
    for place in torch.nonzero((own.float() == its[row].float()).all(dim=1))[:2, 0].tolist():
        by = row - place
        if by != 0 and _same(own[max(0, -by) : len(own) - max(0, by)], its[max(0, by) : len(its) - max(0, -by)]):
            return by
    return None


def _unrelated(before: Tensor, after: Tensor) -> bool:
    return before.shape != after.shape or _error(before, after) > UNRELATED


def _columns(trained: Published, served: Published) -> list[Change]:
    """At most one: fc, if it is the trained one with its column blocks in another order."""
    before, after, slots = trained.tensors[FC], served.tensors[FC], trained.arch.num_aux
    if before.shape != after.shape or _same(before, after):
        return []
    columns = before.chunk(slots, dim=1)
    for order in permutations(range(slots)):
        if _same(torch.cat([columns[i] for i in order], dim=1), after):
            return [Change("columns_swapped", f"fc reads its boundaries in the order {list(order)}")]
    return []


def _attention(trained: Published, served: Published) -> list[Change]:
    """What was done to the projections, if they are the trained ones but for their inputs and their rotary pairs."""
    names = (QUERY, KEY, VALUE)
    before, after = ([p.tensors[n] for n in names if n in p.tensors] for p in (trained, served))
    if [t.shape for t in before] != [t.shape for t in after]:
        return []
    for exchanged, layout in product((False, True), (None, *LAYOUTS)):
        query, key, value = (other_inputs(t) if exchanged else t for t in before)
        if layout is not None:
            query, key = (LAYOUTS[layout](t, trained.arch.head_dim) for t in (query, key))
        if all(_same(a, b) for a, b in zip((query, key, value), after, strict=True)):
            inputs = "q_proj, k_proj and v_proj read [hidden state; embedding], trained was [embedding; hidden state]"
            pairs = f"the rows of q_proj and k_proj were moved as if to lay their rotary pairs {layout}"
            return [
                *([Change("inputs_swapped", inputs)] if exchanged else []),
                *([Change("rotary_layout", pairs)] if layout is not None else []),
            ]
    return []


def _others(before: Mapping[str, Tensor], after: Mapping[str, Tensor], explained: set[str]) -> list[str]:
    """What became of every other tensor that differs."""
    names = sorted((before.keys() | after.keys()) - KNOWN - explained)
    return [said for name in names if (said := _became(name, before, after)) is not None]


def _became(name: str, trained: Mapping[str, Tensor], served: Mapping[str, Tensor]) -> str | None:
    before, after = trained.get(name), served.get(name)
    if before is None or after is None:
        return f"{name} is only in the {'served' if before is None else 'trained'}"
    if _same(before, after):
        return None
    if before.shape != after.shape:
        return f"{name} is {list(after.shape)}, trained {list(before.shape)}"
    if not after.any():
        return f"{name} is zero"
    if bool((after == 1).all()):
        return f"{name} is 1 everywhere, as if it had never been loaded"
    for other, tensor in trained.items():
        if other != name and tensor.dtype == after.dtype and _same(tensor, after):
            return f"{name} holds the trained {other}"
    return f"{name} differs from the trained one by {_error(before, after):.2g} (relative)"


def _error(before: Tensor, after: Tensor) -> float:
    return float((after.float() - before.float()).norm() / before.float().norm().clamp_min(1e-30))


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to what storing in 16 bits loses."""
    if a.shape != b.shape:
        return False
    if a.dtype == b.dtype:
        return torch.equal(a, b)
    return float((a.float() - b.float()).norm()) <= ROUNDING * float(a.float().norm())
