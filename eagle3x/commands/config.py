"""Config of the commands: what is not a stage."""

from __future__ import annotations

from typing import Literal

from eagle3x.schema import config


@config
class ExplainArgs:
    """A figure that an engine printed, and the length of its drafts."""

    command: Literal["explain"]
    rate: float | None
    tau: float | None
    num_draft_tokens: int | None
    num_speculative_tokens: int | None


@config
class ArtifactsArgs:
    """What to do with the artifact store; keys may be shortened."""

    command: Literal["artifacts"]
    action: Literal["list", "explain", "drop"]
    keys: tuple[str, ...]


@config
class ConvertArgs:
    """Where the drafter that the `drafter` group names is written, and as what."""

    command: Literal["convert"]
    to: str
    format: Literal["eagle3", "speculators"]


@config
class ProbeArgs:
    """A dump of hidden states, and how many of its samples are compared with the reference."""

    command: Literal["probe"]
    states: str
    samples: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("samples must be at least 1")


CommandArgs = ExplainArgs | ArtifactsArgs | ConvertArgs | ProbeArgs
COMMANDS: dict[str, type[ExplainArgs] | type[ArtifactsArgs] | type[ConvertArgs] | type[ProbeArgs]] = {
    "explain": ExplainArgs,
    "artifacts": ArtifactsArgs,
    "convert": ConvertArgs,
    "probe": ProbeArgs,
}
