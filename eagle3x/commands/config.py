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
    action: Literal["list", "explain", "drop", "clean"]
    keys: tuple[str, ...]
    older_than_days: float | None
    """clean: drop what no run made, went on with or reused for so long."""
    keep_gib: float | None
    """clean: drop, longest unused first, until the store takes no more than this."""
    dry_run: bool
    """clean: say what would be dropped, and drop nothing."""

    def __post_init__(self) -> None:
        if min(n for n in (self.older_than_days, self.keep_gib, 0.0) if n is not None) < 0:
            raise ValueError("older_than_days and keep_gib must be 0 or more")


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
