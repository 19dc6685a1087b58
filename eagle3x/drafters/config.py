"""Config of the drafter: its source and its architecture."""

from __future__ import annotations

from typing import Annotated, Literal

from eagle3x.drafters.architecture import MadeBy
from eagle3x.identity import PLACEMENT
from eagle3x.schema import config


@config
class Drafter:
    """`custom` is trained here; `pretrained` is loaded (its own config then decides the architecture).

    Where a published checkpoint lies is placement: its content is what is hashed.
    """

    source: Literal["custom", "pretrained"]
    path: Annotated[str | None, PLACEMENT]
    hub_id: Annotated[str | None, PLACEMENT]
    revision: Annotated[str | None, PLACEMENT]
    allow_bin: bool
    """Whether weights may come from `.bin` files, if there are no safetensors: tensors alone are read from them."""
    made_by: MadeBy | None
    """The published drafter's trainer, where its config alone does not say what it means."""
    boundaries: tuple[int, ...] | None
    """What the published drafter was trained on, where its config does not say it."""
    init_from: Annotated[str | None, PLACEMENT]
    """A published drafter (directory or hub id) that training starts from, with its architecture and vocabulary."""
    init: Literal["warm_start", "random"]
    """Without `init_from`: `warm_start` starts from the target's own weights."""
    num_layers: int
    intermediate_size: int | None
    """null: the target's."""
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def __post_init__(self) -> None:
        if self.source == "pretrained" and (self.path is None) == (self.hub_id is None):
            raise ValueError("drafter=pretrained needs drafter.path or drafter.hub_id, one of them")
        if self.source == "pretrained" and self.init_from:
            raise ValueError("init_from is where training starts: drafter=custom drafter.init_from=...")
        if self.source == "custom" and (self.path or self.hub_id):
            raise ValueError("drafter=custom is trained here; use drafter=pretrained with a path or hub_id")
        if self.source == "custom" and self.init_from is None and (self.made_by or self.boundaries or self.allow_bin):
            raise ValueError("made_by, boundaries and allow_bin are of a published drafter, and this one is made here")
        if self.revision is not None and self.path is not None:
            raise ValueError("revision is of a hub_id; a path has none")
        if self.num_layers != 1:
            raise ValueError("num_layers must be 1: no engine serves a deeper EAGLE-3 drafter of this format")
        if self.draft_vocab_size < 2:
            raise ValueError("draft_vocab_size must be at least 2")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")

    @property
    def published(self) -> bool:
        """Whether somebody's checkpoint is read."""
        return self.source == "pretrained" or self.init_from is not None
