"""Vocabulary maps that a drafter may have meant: from its t2d, from its head's rows, from the map one row or id off.

Row i of a drafter's head stands for the target's token ids[i], which a checkpoint says as an offset: i + d2t[i].

Shapes: D rows of the drafter's head, V tokens of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from eagle3x.drafters.checkpoint import HEAD, UNRELATED, Published
from eagle3x.targets import Target
from eagle3x.types import EagleError

VocabularyKind = Literal["d2t_missing", "d2t_shifted", "stale_vocabulary"]
SAMPLED_ROWS = 256
"""Rows that are compared with the whole target before all of them are."""
CHUNK = 1024


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Another map. `why`: what is wrong with the one that the checkpoint has. ids: [D], all different."""

    kind: VocabularyKind
    name: str
    why: str
    ids: Tensor


def written(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The map as tensors of a checkpoint, d2t [D] and t2d [V]."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def read(published: Published) -> Tensor | None:
    """The ids that engines read from d2t, [D]; None if there is no d2t, or it is no map into the vocabulary."""
    d2t = published.tensors.get("d2t")
    if d2t is None:
        return None
    return _valid(torch.arange(len(d2t)) + d2t.long(), published)


def likeness(published: Published, ids: Tensor, target: Target) -> float | None:
    """Median cosine between a row of the drafter's head and the target's head at its id; None where they have no
    common space."""
    heads = _heads(published, target)
    if heads is None:
        return None
    own, its = heads
    return float(F.cosine_similarity(own, its[ids], dim=1).median())


def others(published: Published, target: Target) -> Iterator[VocabularyMap]:
    """Every map that the drafter may have meant, but the one that engines read from it."""
    tensors, arch = published.tensors, published.arch
    if arch.draft_vocab_size == arch.vocab_size:
        return
    claimed, missing = read(published), "d2t" not in tensors
    kind: VocabularyKind = "d2t_missing" if missing else "stale_vocabulary"
    wrong = "the checkpoint has no d2t" if missing else "d2t is of another vocabulary than the head"
    found: list[tuple[VocabularyKind, str, str, Tensor | None]] = []
    if claimed is not None:
        for step in (-1, 1):
            rows, ids = claimed.roll(-step), (claimed + step) % arch.vocab_size
            found.append(("d2t_shifted", f"d2t {step:+d} row", f"d2t is {-step:+d} row off the head's rows", rows))
            found.append(("d2t_shifted", f"d2t {step:+d} id", f"d2t names tokens whose id is {-step:+d} off", ids))
    elif not missing:
        ids = _valid(tensors["d2t"].long(), published)
        found.append(("d2t_shifted", "d2t as ids", "d2t holds target ids, where engines read offsets from i", ids))
    if "t2d" in tensors:
        ids = _valid(torch.nonzero(tensors["t2d"].bool())[:, 0], published)
        found.append((kind, "the map of t2d", f"{wrong}; t2d names its tokens", ids))
    recovered = _by_rows(published, claimed, target)
    found.append((kind, "the map of the head's rows", f"{wrong}; its rows are those of other tokens", recovered))
    seen = [] if claimed is None else [claimed]
    for same_kind, name, why, ids in found:
        if ids is not None and not any(torch.equal(ids, other) for other in seen):
            seen.append(ids)
            yield VocabularyMap(same_kind, name, why, ids)


def _valid(ids: Tensor, published: Published) -> Tensor | None:
    size, vocab = published.arch.draft_vocab_size, published.arch.vocab_size
    if len(ids) != size or int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != size:
        return None
    return ids


def _heads(published: Published, target: Target) -> tuple[Tensor, Tensor] | None:
    """Both heads, [D, H] and [V, H]; None if the drafter has another width, or the target's logits are no product."""
    own: Mapping[str, Tensor] = published.tensors
    if HEAD not in own or own[HEAD].shape[1] != target.hidden_size:
        return None
    try:
        return own[HEAD].float(), target.head()
    except EagleError:
        return None  # a target that scales its logits: its rows say nothing, the other maps still may


def _by_rows(published: Published, claimed: Tensor | None, target: Target) -> Tensor | None:
    """The target's nearest row for each row of the drafter's head, if they are related and the claimed ones are not."""
    heads = _heads(published, target)
    if heads is None:
        return None
    own, its = (F.normalize(head, dim=1) for head in heads)
    if claimed is not None and (own * its[claimed]).sum(1).median() >= UNRELATED:
        return None
    sample = own[torch.linspace(0, len(own) - 1, min(SAMPLED_ROWS, len(own))).long()]
    if (sample @ its.T).amax(1).median() < UNRELATED:
        return None
    best = [chunk.max(1) for chunk in (part @ its.T for part in own.split(CHUNK))]
    nearness, nearest = torch.cat([b.values for b in best]), torch.cat([b.indices for b in best])
    return _all_different(nearness, nearest, len(its))


def _all_different(nearness: Tensor, nearest: Tensor, vocab: int) -> Tensor:
    """`nearest`, each id kept by the row that is nearest to it; the other rows get ids that nobody wants, ascending."""
    order = nearness.argsort(descending=True).tolist()
    ids = torch.full_like(nearest, -1)
    taken: set[int] = set()
    for row, token in zip(order, nearest[order].tolist(), strict=True):
        if token not in taken:
            taken.add(token)
            ids[row] = token
    free = iter(sorted(set(range(vocab)) - taken))
    for row in torch.nonzero(ids < 0)[:, 0].tolist():
        ids[row] = next(free)
    return ids
