"""Scaled rotary embeddings: the types that every reader of a drafter computes alike.

The formulas are transformers' (`modeling_rope_utils.py`), which vLLM's and SGLang's follow. `dynamic`, `longrope` and
`mrope` depend on the length or kind of the input and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagle3x.types import EagleError

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3x.drafters.architecture import Architecture

NEEDS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
YARN_OPTIONS = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}


def scaling(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta, and what scales it (None: plain), of a config under either of transformers' names.

    Raises EagleError for another type, or for a key that is missing or that readers would treat differently.
    """
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(found.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    values = {key: value for key, value in found.items() if value is not None}
    if kind == "default" and not values:
        return theta, None
    if kind not in NEEDS:
        known = ", ".join(NEEDS)
        raise EagleError(f"drafter config: RoPE of type {kind} with {values} is not supported, only plain or {known}")
    missing, other = NEEDS[kind] - values.keys(), values.keys() - NEEDS[kind]
    if missing or (other - (YARN_OPTIONS if kind == "yarn" else set())):
        raise EagleError(
            f"drafter config: RoPE of type {kind} has {sorted(values)}, should have {sorted(NEEDS[kind])}"
            + (f" and may have {sorted(YARN_OPTIONS)}" if kind == "yarn" else "")
        )
    return theta, {"rope_type": kind, **values}


def inverse_frequencies(arch: Architecture) -> tuple[Tensor, float]:
    """Angle per position of each pair [head_dim / 2] (float32, CPU), and what sines and cosines are multiplied by."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert arch.rope_scaling is not None, "plain RoPE has no parameters to work out"
    config = LlamaConfig(
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        head_dim=arch.head_dim,
        max_position_embeddings=arch.max_position_embeddings,
        rope_parameters={**arch.rope_scaling, "rope_theta": arch.rope_theta},
    )
    with torch.device("cpu"):  # a drafter is first built on the meta device
        return ROPE_INIT_FUNCTIONS[arch.rope_scaling["rope_type"]](config, "cpu")
