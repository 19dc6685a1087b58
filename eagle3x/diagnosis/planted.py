"""Faults that are planted on purpose: a diagnosis is believed because it names them (experiment=controls). No torch.

Those of an engine's or a slot's config (`offset_serving`, `quantized_states`) need no code: conf/control sets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from eagle3x.diagnosis.causes import Kind

Fault = Literal[
    "offset_serving",
    "captured_late",
    "normed_states",
    "columns_swapped",
    "inputs_swapped",
    "interleaved_pairs",
    "norm_variant",
    "random_embedding",
    "embedding_shifted",
    "d2t_missing",
    "d2t_shifted",
    "stale_vocabulary",
    "wrong_template",
    "rope_base",
    "other_target",
    "quantized_states",
    "quantized_text",
    "fc_lost",
    "final_norm_lost",
    "projections_exchanged",
]
STAGES: dict[str, tuple[Fault, ...]] = {
    "hidden_states": ("captured_late", "normed_states"),
    "export": (
        "columns_swapped",
        "inputs_swapped",
        "interleaved_pairs",
        "norm_variant",
        "random_embedding",
        "embedding_shifted",
        "d2t_missing",
        "d2t_shifted",
        "stale_vocabulary",
        "rope_base",
        "other_target",
        "fc_lost",
        "final_norm_lost",
        "projections_exchanged",
    ),
    "benchmark": ("wrong_template",),
}
"""Where each is planted."""


@dataclass(frozen=True)
class Called:
    """How a fault must be named: the cause's kind, and how a part of its sentence must begin if the kind is wider."""

    kind: Kind
    said: str = ""


WIDER: dict[Fault, Called] = {
    "captured_late": Called("offset_training"),
    "interleaved_pairs": Called("rotary_layout"),
    "embedding_shifted": Called("random_embedding", "embed_tokens is off by +1 rows"),
    "fc_lost": Called("export_changed", "fc.weight is zero"),
    "final_norm_lost": Called("export_changed", "norm.weight is 1 everywhere"),
    "projections_exchanged": Called(
        "export_changed", "midlayer.self_attn.k_proj.weight holds the trained midlayer.self_attn.v_proj.weight"
    ),
}
"""Faults that share their kind with others."""


def called(fault: Fault) -> Called:
    """How a diagnosis names this fault, if it is right."""
    return WIDER[fault] if fault in WIDER else Called(fault)  # type: ignore[arg-type]  # a fault of its own kind


def planted_in(stage: str, planted: Sequence[Fault]) -> tuple[Fault, ...]:
    """Those of `planted` that `stage` has to plant."""
    return tuple(fault for fault in planted if fault in STAGES.get(stage, ()))
