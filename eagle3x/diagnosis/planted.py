"""Faults that are planted on purpose: a diagnosis is believed because it names them (experiment=controls). No torch.

Those of an engine's or a slot's config (`offset_serving`, `quantized_states`) need no code: conf/control sets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Fault = Literal[
    "offset_serving",
    "offset_training",
    "columns_swapped",
    "norm_variant",
    "random_embedding",
    "d2t_missing",
    "d2t_shifted",
    "stale_vocabulary",
    "wrong_template",
    "rope_base",
    "other_target",
    "normed_states",
    "quantized_states",
    "quantized_text",
    "export_changed",
]
STAGES: dict[str, tuple[Fault, ...]] = {
    "hidden_states": ("offset_training", "normed_states"),
    "export": (
        "columns_swapped",
        "norm_variant",
        "random_embedding",
        "d2t_missing",
        "d2t_shifted",
        "stale_vocabulary",
        "rope_base",
        "other_target",
        "export_changed",
    ),
    "benchmark": ("wrong_template",),
}
"""Where each is planted."""


def planted_in(stage: str, planted: Sequence[Fault]) -> tuple[Fault, ...]:
    """Those of `planted` that `stage` has to plant."""
    return tuple(fault for fault in planted if fault in STAGES.get(stage, ()))
