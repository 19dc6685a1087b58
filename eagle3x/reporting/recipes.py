"""What cells that differ in their seed alone say together: records of the report."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3x.benchmark.bootstrap import Interval


@dataclass(frozen=True)
class Recipe:
    """tau of cells that differ in their seed alone, on the prompts that all of them answered.

    label: by what was swept besides the seed. cells: names, in the order of `seeds`. tau: for other seeds and other
    prompts. by_prompts: for other prompts, these seeds. by_seeds: half-width for other seeds, these prompts. spread:
    standard deviation of a seed's tau beyond what its prompts explain. per_seed: each one's tau.
    """

    label: str
    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    prompts: int
    tau: Interval
    by_prompts: Interval
    by_seeds: float
    spread: float
    per_seed: tuple[float, ...]
    sentence: str


@dataclass(frozen=True)
class RecipeDifference:
    """tau(recipe) - tau(baseline), by label, over the seeds and prompts that both have; parts as in `Recipe`."""

    recipe: str
    baseline: str
    swept: tuple[str, ...]
    seeds: tuple[int, ...]
    prompts: int
    difference: Interval
    by_prompts: Interval
    by_seeds: float
    detectable: float
    p_value: float
    p_holm: float
    verdict: str
