"""What may be wrong with how a drafter is fed or read, as single changes: `finder` tries them, `corrected` writes them.

Shapes: A boundaries, Ht hidden size of the target, D draft vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3x.capture import default_boundaries
from eagle3x.diagnosis import vocabulary_maps
from eagle3x.diagnosis.attention_weights import KEY, QUERY, VALUE, other_inputs, to_halves, to_neighbours
from eagle3x.diagnosis.captured_text import CapturedText
from eagle3x.diagnosis.replay import ReplaySample
from eagle3x.drafters import rope
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.checkpoint import EMBEDDING, Published
from eagle3x.targets import Target
from eagle3x.types import EagleError

Kind = Literal[
    "offset_training", "columns_swapped", "inputs_swapped", "rotary_layout", "norm_variant", "random_embedding",
    "rope_base", "normed_states", "d2t_missing", "d2t_shifted", "stale_vocabulary",
]  # fmt: skip
"""Slugs of causes."""
SHIFTS = (-1, 1, -2, 2)
THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""RoPE bases that targets of the field have, beside this target's own."""
PERMUTED = 3
"""Drafters of more boundaries than this have too many orders of columns; only neighbours are exchanged then."""
INPUT_NORM, FC = "input_norm.weight", "fc.weight"


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One change of how a drafter is fed or read, under which it may be right.

    sentence: what would be wrong. repair: what to change then.
    boundaries: those that it was trained on. columns: where its fc, as it is, holds the columns of each of them,
    ascending. last_column: the last of them stands for the last hidden state after the final norm.
    arch: fields of its Architecture. tensors: small ones in place of its own; None: as if it had none of that name.
    """

    kind: Kind
    name: str
    sentence: str
    repair: str
    boundaries: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    last_column: bool = False
    arch: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Reading:
    """A drafter, and what it is fed: states at `boundaries`, the last of which may be the last hidden state instead."""

    published: Published
    boundaries: tuple[int, ...]
    last_column: bool = False

    def under(self, hypothesis: Hypothesis) -> Reading:
        """As it would be if the hypothesis were true."""
        return Reading(
            changed(self.published, hypothesis),
            hypothesis.boundaries or self.boundaries,
            self.last_column or hypothesis.last_column,
        )

    def samples(self, texts: Iterable[CapturedText]) -> list[ReplaySample]:
        """What replay reads; the texts' last hidden states are after the final norm."""
        fed = [(text, text.fed(self.boundaries)) for text in texts]
        if not self.last_column:
            return [sample for _, sample in fed]
        return [replace(s, aux=torch.cat([s.aux[:, : -t.last.shape[1]], t.last], dim=1)) for t, s in fed]


def changed(published: Published, hypothesis: Hypothesis) -> Published:
    """The checkpoint that would be right if the hypothesis were true (its layer ids apart)."""
    tensors = dict(published.tensors)
    if hypothesis.columns is not None:
        order = list(hypothesis.columns)
        for name in (FC, INPUT_NORM):
            if name in tensors:
                parts = tensors[name].unflatten(-1, (len(order), -1))
                tensors[name] = parts[..., order, :].flatten(-2).contiguous()
        norms = [tensors.get(norm_name(j)) for j in order]
        tensors |= {norm_name(j): norm for j, norm in enumerate(norms) if norm is not None}
    for name, tensor in hypothesis.tensors.items():
        if tensor is None:
            tensors.pop(name, None)
        else:
            tensors[name] = tensor
    return replace(published, arch=replace(published.arch, **hypothesis.arch), tensors=tensors)


def boundaries_needed(claimed: tuple[int, ...] | None, target: Target) -> tuple[int, ...]:
    """What to capture so that every boundary can be tried, ascending: up to two beside each that may be meant.

    The embedding and the last block's output, which not every engine captures, only where they are claimed.
    """
    meant = {b for choice in usual_choices(target) for b in choice}
    near = {b + d for b in claimed or meant for d in (0, *SHIFTS)}
    inner = {b for b in near | meant if 1 <= b < target.num_blocks}
    return tuple(sorted(inner | set(claimed or ())))


def usual_choices(target: Target) -> list[tuple[int, ...]]:
    """Boundaries that drafters are trained on: the default of engines and trainers, and the ids of the target's config
    as vLLM and as SGLang read them."""
    ids = target.aux_layer_ids
    return [default_boundaries(target.num_blocks), ids, tuple(i + 1 for i in ids)]


def readable(published: Published) -> Published:
    """What lenient engines make of a checkpoint that `checkpoint.module` refuses for its map or its norms before fc.

    A t2d is ignored, norms that the config does not name are dropped, and those that it lacks are ones; where there is
    no d2t, draft ids are target ids. A d2t that is no map is taken as none: no engine can draft with it.
    """
    arch, ids = published.arch, vocabulary_maps.read(published)
    tensors = {name: t for name, t in published.tensors.items() if name != "t2d"}
    if ids is None:
        tensors["d2t"] = torch.zeros(arch.draft_vocab_size, dtype=torch.int64)
    named = _norms(arch)
    for name in (INPUT_NORM, *(norm_name(j) for j in range(arch.num_aux))):
        if name not in named:
            tensors.pop(name, None)
        elif name not in tensors:
            tensors[name] = torch.ones(named[name])
    return replace(published, tensors=tensors)


def hypotheses(
    reading: Reading, original: Published, target: Target, captured: Sequence[int], num_speculative_tokens: int
) -> list[Hypothesis]:
    """All single changes of `reading` that texts with the boundaries `captured` can tell.

    original: the checkpoint before `readable`, whose tensors that nobody reads are candidates too.
    """
    found = [
        *offsets(reading, target, captured),
        *_columns(reading),
        *_attention(reading),
        *_norm_variants(reading, original, num_speculative_tokens),
        *_normed_states(reading, target),
        *_embedding(reading, original, target),
        *_rope(reading, target),
    ]
    for m in vocabulary_maps.others(_with_map(reading, original), target):
        tensors = vocabulary_maps.written(m.ids, target.vocab_size)
        found.append(Hypothesis(m.kind, m.name, m.why, "rewrite d2t and t2d", tensors=dict(tensors)))
    return found


def offsets(reading: Reading, target: Target, captured: Sequence[int]) -> Iterator[Hypothesis]:
    """Other boundaries: all of them up to 2 blocks off, each one alone, and what drafters are usually trained on."""
    now = reading.boundaries
    together = [tuple(b + d for b in now) for d in SHIFTS]
    alone = [tuple(b + d * (i == j) for j, b in enumerate(now)) for i in range(len(now)) for d in SHIFTS]
    for boundaries in dict.fromkeys([*together, *alone, *usual_choices(target)]):
        ascending = all(a < b for a, b in itertools.pairwise(boundaries))
        if boundaries != now and len(boundaries) == len(now) and ascending and set(boundaries) <= set(captured):
            yield offset(boundaries, f"it is fed {_listed(now)}")


def offset(boundaries: tuple[int, ...], instead: str) -> Hypothesis:
    """The drafter was trained on `boundaries`."""
    return Hypothesis(
        "offset_training",
        f"boundaries {_listed(boundaries)}",
        f"the drafter was trained on boundaries {_listed(boundaries)}; {instead}",
        "write the layer ids that mean these boundaries to each engine",
        boundaries=boundaries,
    )


def norm_name(j: int) -> str:
    """The norm over boundary j before fc."""
    return f"fc_norm.{j}.weight"


def _with_map(reading: Reading, original: Published) -> Published:
    """The reading's map beside the original's t2d; no map where the original has none and none was found yet."""
    tensors = {n: t for n, t in reading.published.tensors.items() if n != "t2d"}
    if "t2d" in original.tensors:
        tensors["t2d"] = original.tensors["t2d"]
    if vocabulary_maps.read(original) is None and torch.equal(tensors["d2t"], torch.zeros_like(tensors["d2t"])):
        tensors.pop("d2t")
        if "d2t" in original.tensors:
            tensors["d2t"] = original.tensors["d2t"]
    return replace(reading.published, tensors=tensors)


def _columns(reading: Reading) -> Iterator[Hypothesis]:
    slots = range(reading.published.arch.num_aux)
    if len(slots) <= PERMUTED:
        orders = list(itertools.permutations(slots))
    else:
        orders = [(*slots[:i], i + 1, i, *slots[i + 2 :]) for i in slots[:-1]] + [tuple(reversed(slots))]
    for order in orders:
        if order != tuple(slots):
            yield Hypothesis(
                "columns_swapped",
                f"columns {_listed(order)}",
                f"fc's columns stand in another order than the boundaries: the first is column block {order[0]}",
                f"put fc's column blocks into the order {_listed(order)}",
                columns=order,
            )


def _attention(reading: Reading) -> Iterator[Hypothesis]:
    """Projections that were written for another order of what they read, or another layout of rotary pairs."""
    tensors, head_dim = reading.published.tensors, reading.published.arch.head_dim
    yield Hypothesis(
        "inputs_swapped",
        "attention reads the hidden state first",
        "the drafter's attention was trained to read [hidden state; embedding]; engines give [embedding; hidden state]",
        "exchange the halves of the columns of q_proj, k_proj and v_proj",
        tensors={name: other_inputs(tensors[name]) for name in (QUERY, KEY, VALUE)},
    )
    for now, move in (("neighbours", to_halves), ("permuted twice", to_neighbours)):
        yield Hypothesis(
            "rotary_layout",
            f"rotary pairs {now}",
            f"q_proj and k_proj were written for rotary pairs that are {now}; engines take rows half a head apart",
            "put the rows of q_proj and k_proj into the order that transformers' Llama has",
            tensors={name: move(tensors[name], head_dim) for name in (QUERY, KEY)},
        )


def _norm_variants(reading: Reading, original: Published, k: int) -> Iterator[Hypothesis]:
    arch = reading.published.arch
    flags = ["norm_before_residual", *(["norm_output"] if k > 1 else [])]  # norm_output acts from the second draft on
    changes: list[tuple[str, bool, dict[str, Tensor | None]]] = [(f, not getattr(arch, f), {}) for f in flags]
    if arch.norm_before_fc or arch.fc_norm:
        flag = "norm_before_fc" if arch.norm_before_fc else "fc_norm"
        changes.append((flag, False, dict.fromkeys(_norms(arch))))
    else:
        for flag in ("norm_before_fc", "fc_norm"):  # if the checkpoint has weights for them that nobody reads
            names = _norms(replace(arch, **{flag: True}))
            if names.keys() <= original.tensors.keys():
                changes.append((flag, True, {name: original.tensors[name] for name in names}))
    for flag, value, tensors in changes:
        yield Hypothesis(
            "norm_variant",
            f"{flag}={str(value).lower()}",
            f"the drafter was trained with {flag}={str(value).lower()}; its config says the other",
            f"write {flag}: {str(value).lower()} into its config.json",
            arch={flag: value},
            tensors=tensors,
        )


def _norms(arch: Architecture) -> dict[str, int]:
    """Names and sizes of the norms before fc."""
    if arch.norm_before_fc:
        return {INPUT_NORM: arch.num_aux * arch.target_hidden_size}
    return {norm_name(j): arch.target_hidden_size for j in range(arch.num_aux)} if arch.fc_norm else {}


def _normed_states(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    arch = reading.published.arch
    if not (arch.norm_before_fc or arch.fc_norm):
        scales = {"normed": torch.ones(target.hidden_size), "after the final norm": target.final_norm()}
        for what, scale in scales.items():
            yield Hypothesis(
                "normed_states",
                f"states {what}",
                f"the drafter was trained on states {what}, and is fed the stream as it is",
                "let the drafter norm each boundary itself: fc_norm with the weights of that norm",
                arch={"fc_norm": True},
                tensors={norm_name(j): scale for j in range(arch.num_aux)},
            )
    if not reading.last_column:
        yield Hypothesis(
            "normed_states",
            "last hidden state",
            "the drafter was trained on the last hidden state, after the final norm, in place of its last boundary",
            "no engine feeds that state: train it again on boundaries",
            last_column=True,
        )


def _embedding(reading: Reading, original: Published, target: Target) -> Iterator[Hypothesis]:
    own = reading.published.tensors.get(EMBEDDING)
    if EMBEDDING not in original.tensors or own is None or own.shape[1] != target.hidden_size:
        return
    if not torch.equal(original.tensors[EMBEDDING].float(), target.embedding()):
        yield Hypothesis(
            "random_embedding",
            "the target's embedding",
            "the embedding in the checkpoint is not the one that the drafter was trained with: that is the target's",
            "leave embed_tokens out of the checkpoint: engines then share the target's",
            tensors={EMBEDDING: None},
        )


def _rope(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    arch = reading.published.arch
    now = (arch.rope_theta, arch.rope_scaling)
    bases = [(theta, arch.rope_scaling) for theta in (target.rope_theta, *THETAS)] + [(arch.rope_theta, None)]
    with contextlib.suppress(EagleError):  # a scaling that no drafter here can have
        bases.append(rope.scaling(target.text_config()))
    for i, base in enumerate(bases):
        if base == now or base in bases[:i]:
            continue
        theta, scaling = base
        said = f"rope_theta {theta:g}" + (f" with {scaling['rope_type']} scaling" if scaling else "")
        yield Hypothesis(
            "rope_base",
            said,
            f"the drafter was trained with {said}; its config says {arch.rope_theta:g}",
            f"write {said} into its config.json",
            arch={"rope_theta": theta, "rope_scaling": scaling},
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
