"""Which boundaries a published drafter was trained on: from what its config says and what the user says of it.

Nothing is guessed. Ids at the top level are boundaries wherever they are read; ids in `eagle_config` are boundaries to
some trainers and blocks to others; without ids only EAGLE's own code, which has no choice, is certain. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3x.capture import KEY, NESTED, Reader, default_boundaries, predicted_boundaries, trained_boundaries
from eagle3x.drafters.architecture import MadeBy
from eagle3x.drafters.config import Drafter
from eagle3x.drafters.config_keys import is_speculators

TRAINERS_OF_BLOCKS = "specforge, torchspec, modelopt or automodel"


@dataclass(frozen=True)
class Origin:
    """boundaries: what the drafter was trained on, None if nobody can know. said_by: who says so, or what to do."""

    boundaries: tuple[int, ...] | None
    said_by: str


def of(cfg: Drafter, raw: Mapping[str, Any], num_blocks: int) -> Origin:
    """The boundaries of the drafter with this config.json.

    Raises CaptureError (a ConfigError) for ids that are no boundaries of the target.
    """
    if cfg.boundaries is not None:
        return Origin(trained_boundaries(cfg.boundaries, 0, num_blocks), "drafter.boundaries")
    nested = raw.get(NESTED) if isinstance(raw.get(NESTED), Mapping) else {}
    top, inner = raw.get(KEY), (nested or {}).get(KEY)
    maker: MadeBy | None = "speculators" if is_speculators(raw) else cfg.made_by
    if maker == "eagle":
        return Origin(default_boundaries(num_blocks), "drafter.made_by=eagle, whose code has these and no others")
    if maker is not None and (top or inner):
        return Origin(predicted_boundaries(Reader(maker), raw, num_blocks), f"its {KEY}, as {maker} writes them")
    if top:
        return Origin(trained_boundaries(top, 0, num_blocks), f"its top-level {KEY}")
    if inner:
        after = list(predicted_boundaries(Reader("specforge"), raw, num_blocks))
        return Origin(
            None,
            f"its config names layer ids {inner} in {NESTED} alone, where some trainers mean boundaries and others"
            f" blocks: say drafter.boundaries={_list(inner)} or {_list(after)}, or"
            f" who made it: drafter.made_by={TRAINERS_OF_BLOCKS} means {after}",
        )
    default = list(default_boundaries(num_blocks)) if num_blocks > 4 else []
    return Origin(
        None,
        "its config names no layer ids: say drafter.boundaries=[...] as its trainer had them (most trainers' default"
        f" is {_list(default)} here, and EAGLE's own code has no other: drafter.made_by=eagle)",
    )


def _list(ids: list[int]) -> str:
    return str(ids).replace(" ", "")
