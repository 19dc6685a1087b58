"""Config of the drafter: its source and its architecture."""

from __future__ import annotations

from typing import Annotated, Literal

from eagle3x.identity import PLACEMENT
from eagle3x.schema import config


@config
class Drafter:
    """`custom` is trained here; `pretrained` is loaded (its own config then decides the architecture)."""

    source: Literal["custom", "pretrained"]
    path: Annotated[str | None, PLACEMENT]
    hub_id: str | None
    revision: str | None
    init: Literal["warm_start", "random"]
    """`warm_start` starts from the target's own weights."""
    num_layers: int
    intermediate_size: int | None
    """null: the target's."""
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def __post_init__(self) -> None:
        if self.source == "pretrained" and self.path is None and self.hub_id is None:
            raise ValueError("drafter=pretrained needs drafter.path or drafter.hub_id")
        if self.source == "custom" and (self.path or self.hub_id):
            raise ValueError("drafter=custom is trained here; use drafter=pretrained with a path or hub_id")
        if self.num_layers != 1:
            raise ValueError("num_layers must be 1: no engine serves a deeper EAGLE-3 drafter of this format")
        if self.draft_vocab_size < 2:
            raise ValueError("draft_vocab_size must be at least 2")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
