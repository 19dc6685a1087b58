"""Which cells of a matrix are one recipe with several seeds, their pooled tau, and differences between recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eagle3x.benchmark.bootstrap import Bootstrap
from eagle3x.benchmark.seeds import Pooled, compare_pooled, pool_tau
from eagle3x.benchmark.statistics import holm
from eagle3x.data.turns import conversations
from eagle3x.reporting.acceptance import Request, read_requests
from eagle3x.reporting.cell import Cell
from eagle3x.reporting.comparisons import FEWEST_PROMPTS, bootstrap_of, pairs
from eagle3x.reporting.confounders import override_map, short_names
from eagle3x.reporting.recipes import Recipe, RecipeDifference
from eagle3x.types import SpecCounters

SEED = "seed"


@dataclass(frozen=True)
class Group:
    """The cells of a recipe by their seed, and what each of them counted. overrides: without the seed."""

    overrides: tuple[str, ...]
    cells: dict[int, Cell]
    requests: dict[int, dict[str, Request]]

    @property
    def bootstrap(self) -> Bootstrap:
        """As the first of them."""
        return bootstrap_of(next(iter(self.cells.values())))


def pool_cells(cells: Sequence[Cell]) -> tuple[list[Recipe], list[RecipeDifference]]:
    """The recipes that were measured with at least two seeds, and what they differ by; p-values Holm-adjusted."""
    groups = _groups(cells)
    overrides = [g.overrides for g in groups]
    labels = short_names(overrides, [" ".join(o) or "default" for o in overrides])
    recipes = [_recipe(group, label) for group, label in zip(groups, labels, strict=True)]
    found: list[RecipeDifference] = []
    for pair in pairs(overrides):
        one, other = groups[pair.cell], groups[pair.baseline]
        seeds = tuple(seed for seed in one.cells if seed in other.cells)
        prompts = _common([one.requests[s] for s in seeds] + [other.requests[s] for s in seeds])
        if len(seeds) < 2 or len(set(conversations(prompts))) < FEWEST_PROMPTS:
            continue
        pooled = compare_pooled(_counted(one, seeds, prompts), _counted(other, seeds, prompts), prompts, one.bootstrap)
        found.append(_difference(pooled, labels[pair.cell], labels[pair.baseline], pair.swept, seeds))
    adjusted = holm([d.p_value for d in found])
    return recipes, [replace(d, p_holm=p) for d, p in zip(found, adjusted, strict=True)]


def _groups(cells: Sequence[Cell]) -> list[Group]:
    groups: dict[tuple[str, ...], Group] = {}
    for cell in cells:
        if cell.benchmark_dir is None or cell.error is not None:
            continue
        named = override_map(cell.overrides)
        without = tuple(f"{key}={value}" for key, value in named.items() if key != SEED)
        group = groups.setdefault(without, Group(without, {}, {}))
        group.cells.setdefault(cell.config[SEED], cell)
        group.requests.setdefault(cell.config[SEED], read_requests(cell.benchmark_dir))
    several = [g for g in groups.values() if len(g.cells) > 1]
    return [g for g in several if len(set(conversations(_common(list(g.requests.values()))))) >= FEWEST_PROMPTS]


def _common(requests: Sequence[Mapping[str, Request]]) -> list[str]:
    """The prompts that all answered, in the order of the first."""
    first, *others = requests or [{}]
    return [id for id in first if all(id in other for other in others)]


def _counted(group: Group, seeds: Sequence[int], prompts: Sequence[str]) -> list[list[SpecCounters]]:
    return [[group.requests[seed][id].served for id in prompts] for seed in seeds]


def _recipe(group: Group, label: str) -> Recipe:
    seeds, prompts = tuple(group.cells), _common(list(group.requests.values()))
    pooled = pool_tau(_counted(group, seeds, prompts), prompts, group.bootstrap)
    return Recipe(
        label=label,
        cells=tuple(cell.name for cell in group.cells.values()),
        seeds=seeds,
        prompts=pooled.prompts,
        tau=pooled.figure,
        by_prompts=pooled.by_prompts,
        by_seeds=pooled.by_seeds,
        spread=pooled.spread,
        per_seed=pooled.per_seed,
        sentence=pooled.sentence,
    )


def _difference(
    pooled: Pooled, recipe: str, baseline: str, swept: tuple[str, ...], seeds: tuple[int, ...]
) -> RecipeDifference:
    figure = pooled.figure
    verdict = f"a difference of {figure.value:+.3f} ({figure.low:+.3f} to {figure.high:+.3f})"
    if figure.contains(0):
        more = "seeds" if pooled.by_seeds > pooled.by_prompts.half_width else "prompts"
        verdict = f"no difference shown (smallest detectable: {pooled.detectable:.3f}; more {more} would help most)"
    return RecipeDifference(
        recipe=recipe,
        baseline=baseline,
        swept=swept,
        seeds=seeds,
        prompts=pooled.prompts,
        difference=figure,
        by_prompts=pooled.by_prompts,
        by_seeds=pooled.by_seeds,
        detectable=pooled.detectable,
        p_value=pooled.p_value,
        p_holm=pooled.p_value,
        verdict=verdict,
    )
