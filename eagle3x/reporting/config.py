"""Config of Weights & Biases."""

from __future__ import annotations

from typing import Annotated, Literal

from eagle3x.identity import PLACEMENT
from eagle3x.schema import config


@config
class Tracking:
    """`auto`: online if this machine is logged in, else offline."""

    mode: Literal["auto", "online", "offline", "disabled"]
    project: str
    entity: str | None
    tags: tuple[str, ...]
    dir: Annotated[str | None, PLACEMENT]
