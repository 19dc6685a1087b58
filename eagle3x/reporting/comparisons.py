"""Which cells of a matrix are compared, and their paired differences of tau."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagle3x.benchmark.bootstrap import Bootstrap
from eagle3x.benchmark.statistics import compare_tau, holm
from eagle3x.config import Config
from eagle3x.data.turns import conversations
from eagle3x.progress import log
from eagle3x.reporting.acceptance import Request, read_requests
from eagle3x.reporting.cell import Cell
from eagle3x.reporting.confounders import Confounder, confounders, override_map, placement_paths, swept_keys
from eagle3x.reporting.summary import PairedDifference

PLACEMENT = placement_paths(Config)
FEWEST_PROMPTS = 2


@dataclass(frozen=True)
class Pair:
    """A cell and the cell it is compared with: `swept` are the override keys in which they differ."""

    cell: int
    baseline: int
    swept: tuple[str, ...]


def pairs(overrides: Sequence[Sequence[str]]) -> list[Pair]:
    """Controlled pairs: cells that differ in one swept key, against the cell with that key's first value.

    A cell that no other differs from in one key alone is compared with the first cell.
    """
    keys = swept_keys(overrides)
    values = [tuple(override_map(o).get(k) for k in keys) for o in overrides]
    found: list[Pair] = []
    for i, own in enumerate(values):
        baselines: dict[int, tuple[str, ...]] = {}
        for k, key in enumerate(keys):
            alike = [j for j in range(i) if all((own[x] == values[j][x]) == (x != k) for x in range(len(keys)))]
            if alike:
                baselines[alike[0]] = (key,)
        if i and not baselines:
            baselines[0] = tuple(key for k, key in enumerate(keys) if own[k] != values[0][k])
        found += [Pair(i, j, swept) for j, swept in baselines.items()]
    return found


def first_pairs(overrides: Sequence[Sequence[str]]) -> dict[int, Pair]:
    """For each cell but the first, the pair in which it is compared first."""
    return {p.cell: p for p in reversed(pairs(overrides))}


def compare_cells(cells: Sequence[Cell]) -> list[PairedDifference]:
    """Paired differences of all pairs whose cells both have a benchmark; p-values Holm-adjusted over all of them.

    Cells that differ in their seed alone are no pair: what they say together is pooled (`pooling.py`).
    """
    requests = {i: read_requests(c.benchmark_dir) for i, c in enumerate(cells) if c.benchmark_dir and c.error is None}
    found: list[PairedDifference] = []
    for pair in pairs([c.overrides for c in cells]):
        if pair.swept == ("seed",) or pair.cell not in requests or pair.baseline not in requests:
            continue
        own, other = requests[pair.cell], requests[pair.baseline]
        common = [r for r in own if r in other]
        shared = len(set(conversations(common)))
        if shared < FEWEST_PROMPTS:
            log(f"{cells[pair.cell].name} and {cells[pair.baseline].name} share {shared} prompts: not compared")
            continue
        found.append(_compare(cells, pair, [own[r] for r in common], [other[r] for r in common]))
    adjusted = holm([p.p_value for p in found])
    return [replace(p, p_holm=value) for p, value in zip(found, adjusted, strict=True)]


def bootstrap_of(cell: Cell) -> Bootstrap:
    """How this cell's intervals are made."""
    settings = cell.config["benchmark"]
    return Bootstrap(settings["resamples"], settings["confidence"], cell.config["seed"])


def found_confounders(cells: Sequence[Cell], pair: Pair) -> tuple[Confounder, ...]:
    """In what the pair differs beyond what was swept."""
    return tuple(confounders(cells[pair.cell].config, cells[pair.baseline].config, pair.swept, PLACEMENT))


def _compare(cells: Sequence[Cell], pair: Pair, own: Sequence[Request], other: Sequence[Request]) -> PairedDifference:
    cell, baseline = cells[pair.cell], cells[pair.baseline]
    bootstrap = bootstrap_of(cell)
    prompts = [r.id for r in own]
    served = compare_tau([r.served for r in own], [r.served for r in other], prompts, bootstrap)
    replayed = [(a.replayed, b.replayed) for a, b in zip(own, other, strict=True) if a.replayed and b.replayed]
    predicted = None
    if len(replayed) == len(own):
        predicted = compare_tau([a for a, _ in replayed], [b for _, b in replayed], prompts, bootstrap).difference
    return PairedDifference(
        cell=cell.name,
        baseline=baseline.name,
        swept=pair.swept,
        prompts=served.prompts,
        difference=served.difference,
        replay_difference=predicted,
        detectable=served.detectable,
        p_value=served.p_value,
        p_holm=served.p_value,
        verdict=served.verdict,
        confounders=found_confounders(cells, pair),
    )
