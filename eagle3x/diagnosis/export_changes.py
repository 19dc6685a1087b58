"""In what the served checkpoint differs from the trained one: tensor by tensor, key by key."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
ROUNDING = 2**-7
"""Relative difference of a tensor that was stored in 16 bits."""


@dataclass(frozen=True)
class Change:
    """One difference, and what it is called if it costs acceptance."""

    kind: Kind
    sentence: str


def changes(trained: Published, served: Published, target: Target) -> list[Change]:
    """Every difference between the two checkpoints, layer ids apart: those are the engine's business."""
    found = [*_config(trained, served), *_vocabulary(trained, served)]
    own, its = _embedding(trained, target), _embedding(served, target)
    if not _same(own, its):
        likeness = float(torch.nn.functional.cosine_similarity(own.float(), its.float(), dim=1).median())
        fused, other = trained.tensors["fc.weight"], served.tensors["fc.weight"]
        if likeness < UNRELATED and (fused.shape != other.shape or _error(fused, other) > UNRELATED):
            said = f"embed_tokens and fc are another drafter's (median cosine of the embeddings {likeness:.2f})"
            return [Change("other_target", said)]
        found.append(
            Change("random_embedding", f"embed_tokens is another one: median cosine {likeness:.2f} to the trained one")
        )
    known = {"d2t", "t2d", EMBEDDING}
    for name in sorted((trained.tensors.keys() | served.tensors.keys()) - known):
        before, after = trained.tensors.get(name), served.tensors.get(name)
        if before is None or after is None:
            found.append(Change("export_changed", f"{name} is only in the {'served' if before is None else 'trained'}"))
        elif not _same(before, after):
            found.append(_tensor(name, before, after, trained.arch.num_aux))
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


def _embedding(published: Published, target: Target) -> Tensor:
    own = published.tensors.get(EMBEDDING)
    return target.embedding() if own is None else own


def _tensor(name: str, before: Tensor, after: Tensor, num_aux: int) -> Change:
    if name == "fc.weight" and before.shape == after.shape:
        columns = before.chunk(num_aux, dim=1)
        for order in permutations(range(num_aux)):
            if _same(torch.cat([columns[i] for i in order], dim=1), after):
                return Change("columns_swapped", f"fc reads its boundaries in the order {list(order)}")
    if before.shape != after.shape:
        return Change("export_changed", f"{name} is {list(after.shape)}, trained {list(before.shape)}")
    return Change("export_changed", f"{name} differs from the trained one by {_error(before, after):.2g} (relative)")


def _error(before: Tensor, after: Tensor) -> float:
    return float((after.float() - before.float()).norm() / before.float().norm().clamp_min(1e-30))


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to what storing in 16 bits loses."""
    if a.shape != b.shape:
        return False
    if a.dtype == b.dtype:
        return torch.equal(a, b)
    return float((a.float() - b.float()).norm()) <= ROUNDING * float(a.float().norm())
