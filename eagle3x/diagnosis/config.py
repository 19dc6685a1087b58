"""Config of the diagnosis."""

from __future__ import annotations

from eagle3x.schema import config


@config
class Diagnose:
    """How much of the text each part of the diagnosis reads. The ladder reads all that the benchmark asks."""

    finder_prompts: int
    """Eval prompts on which other readings of the drafter are replayed; 0: the finder does not run."""
    drift_prompts: int
    """Eval prompts whose states are compared with the reference's; 0: no drift."""

    def __post_init__(self) -> None:
        for name in ("finder_prompts", "drift_prompts"):
            if (value := getattr(self, name)) < 0 or value == 1:
                raise ValueError(f"{name} must be 0 or at least 2, not {value}: one prompt has no interval")
