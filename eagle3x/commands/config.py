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


@config
class EstimateArgs:
    """What is known by hand; what is null comes from the artifacts of this config."""

    command: Literal["estimate"]
    survival: tuple[float, ...] | None
    """Survival by position; null: the finished drafter is replayed on its val text."""
    plain_step_ms: float | None
    """A decode step without a drafter; with the next two, or none of them: then a benchmark's timing pass is read."""
    verify_step_ms: float | None
    """A forward of the target over k + 1 tokens, without its drafts."""
    draft_step_ms: float | None
    batch: int
    """At which the three times were taken."""
    longest: int
    """Chains of 1 to so many drafts are estimated, as far as the text or the survival goes."""

    def __post_init__(self) -> None:
        given = [self.plain_step_ms, self.verify_step_ms, self.draft_step_ms]
        if None in given and given != [None] * 3:
            raise ValueError("give plain_step_ms, verify_step_ms and draft_step_ms, or none of them")
        if any(ms is not None and ms <= 0 for ms in given):
            raise ValueError("a step takes more than 0 ms")
        if self.batch < 1 or self.longest < 1:
            raise ValueError("batch and longest must be at least 1")


CommandArgs = ExplainArgs | ArtifactsArgs | ConvertArgs | ProbeArgs | EstimateArgs
COMMANDS: dict[str, type[CommandArgs]] = {
    "explain": ExplainArgs,
    "artifacts": ArtifactsArgs,
    "convert": ConvertArgs,
    "probe": ProbeArgs,
    "estimate": EstimateArgs,
}
