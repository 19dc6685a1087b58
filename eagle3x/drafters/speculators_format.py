"""A drafter as speculators writes it: the block's keys nested, the target named, `layers.0.` for `midlayer.`.

Formats: speculators 0.9.0, `models/eagle3/config.py`, `models/eagle3/core.py`. Read back by config_keys and
weight_names; vLLM serves both formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eagle3x.capture import KEY
from eagle3x.drafters import weight_names
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.config_keys import SPECULATORS
from eagle3x.targets import Target
from eagle3x.types import EagleError

VERSION = "0.9.0"
OF_THE_DRAFTER = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OF_OUR_FORMAT = ("architectures", "target_hidden_size", "num_aux_hidden_states", "rope_theta", "rope_scaling")


def config(
    arch: Architecture, dtype: str, boundaries: tuple[int, ...], target: Target, speculative_tokens: int
) -> dict[str, Any]:
    """config.json. `speculative_tokens`: drafts per step that the checkpoint asks vLLM for if nobody says otherwise.

    Raises EagleError for a drafter of another width than its target, which speculators cannot express, or for another
    number of boundaries than fc reads.
    """
    if arch.hidden_size != arch.target_hidden_size:
        raise EagleError(f"speculators' fc reads states as wide as the drafter: {arch.hidden_size}, not "
                         f"{arch.target_hidden_size}")  # fmt: skip
    if len(boundaries) != arch.num_aux:
        raise EagleError(f"the drafter's fc reads {arch.num_aux} boundaries, not {list(boundaries)}")
    own = arch.to_config()
    block = {key: value for key, value in own.items() if key not in (*OF_THE_DRAFTER, *OF_OUR_FORMAT)}
    rope = {"rope_type": "default", **(arch.rope_scaling or {}), "rope_theta": arch.rope_theta}
    return {
        "architectures": [SPECULATORS[0]],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
            "verifier": {"name_or_path": target.name, "architectures": [target.model_class]},
        },
        "transformer_layer_config": {**block, "rope_parameters": rope},
        **{key: own[key] for key in OF_THE_DRAFTER},
        "target_hidden_size": None,
        KEY: list(boundaries),
        "embed_requires_grad": False,
        "torch_dtype": dtype,
    }


def tensors(ours: Mapping[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """The same tensors under speculators' names; it has no vocabulary map where there is nothing to map."""
    left_out = ("d2t", "t2d") if arch.draft_vocab_size == arch.vocab_size else ()
    return {weight_names.speculators(name): tensor for name, tensor in ours.items() if name not in left_out}
