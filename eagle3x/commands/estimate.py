"""`command=estimate`: what a drafter is worth at each number of drafts, before it is served. No engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from eagle3x.benchmark.bootstrap import Bootstrap, Interval
from eagle3x.benchmark.statistics import tau_interval
from eagle3x.commands.config import EstimateArgs
from eagle3x.config import Config
from eagle3x.diagnosis.estimate import (
    Estimate,
    Row,
    StepCosts,
    costs_of_times,
    estimate,
    measured_cost,
    taus_of_survival,
)
from eagle3x.pipeline import STAGES
from eagle3x.reporting.words import figure, times
from eagle3x.types import ConfigError

if TYPE_CHECKING:
    from eagle3x.artifacts import Store
    from eagle3x.targets import Target

BY_HAND = "plain_step_ms=, verify_step_ms= and draft_step_ms="


def run(args: EstimateArgs, cfg: Config, console: Console) -> None:
    """Print the table.

    Raises:
        ConfigError: something is neither given nor in the store; the message says which run would leave it there.
    """
    from eagle3x import targets
    from eagle3x.artifacts import Store

    by_hand = args.survival is not None and args.plain_step_ms is not None
    target = None if by_hand else targets.resolve(cfg.target)
    store = Store(Path(cfg.artifacts))
    costs = _costs(args, cfg, target, store)  # before the replay: it is cheaper to miss
    taus, origin = _taus(args, cfg, target, store)
    show(estimate(taus, costs), origin, console)


def show(found: Estimate, origin: str, console: Console) -> None:
    """The table, and what it rests on. origin: where tau is from."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header in ("k", "batch", "τ", "step cost", "speed-up", "pays"):
        table.add_column(header, no_wrap=header != "pays")
    for row in found.rows:
        best = found.best[row.batch] == row.num_speculative_tokens
        cells = (str(row.num_speculative_tokens), str(row.batch), _figure(row.tau), _cost(row), _times(row.speedup))
        table.add_row(*cells, row.pays, style="bold" if best else None)
    console.print(table)
    said = [f"k: drafts a step. τ: {origin}. It breaks even where it is the step cost."]
    said += [f"Step costs at batch {batch}, in plain steps: {source}." for batch, source in found.sources.items()]
    said += [f"{text[0].upper()}{text[1:]}." for text in found.assumptions]
    said += [f"At batch {batch}: {_advice(found, batch, k)}." for batch, k in found.best.items()]
    for line in said:
        console.print(line, markup=False, soft_wrap=True)


def measured_costs(store: Store, identity: dict[str, Any]) -> list[StepCosts]:
    """Step costs of the benchmarks that were timed with chains on this target, serve slot and hardware.

    identity: of those three, as a manifest has it. Of several at one batch and length the newest counts.
    """
    found: dict[int, dict[int, tuple[Interval, str]]] = {}
    for artifact in store.complete("benchmark"):
        made = artifact.manifest
        if made.version != STAGES["benchmark"].version or any(made.identity[n] != v for n, v in identity.items()):
            continue
        cell = json.loads((artifact.path / "cell.json").read_text(encoding="utf-8"))
        for batch, timed in (cell["speedup"] or {}).items():
            if cell["topk"] == 1 and timed["tau"] is not None:
                cost = measured_cost(timed["tau"], Interval(**timed["decode"]))
                found.setdefault(int(batch), {})[cell["num_speculative_tokens"]] = (cost, artifact.key)
    return [
        StepCosts(
            batch,
            tuple((k, cost) for k, (cost, _) in sorted(points.items())),
            "measured by " + ", ".join(f"benchmark {key} (k = {k})" for k, (_, key) in sorted(points.items())),
        )
        for batch, points in sorted(found.items())
    ]


def _costs(args: EstimateArgs, cfg: Config, target: Target | None, store: Store) -> list[StepCosts]:
    plain, verify, draft = args.plain_step_ms, args.verify_step_ms, args.draft_step_ms
    if plain is not None and verify is not None and draft is not None:
        return [costs_of_times(args.batch, plain, verify, draft, args.longest)]
    from eagle3x.identity import identity_of
    from eagle3x.manifest import masked
    from eagle3x.stage_identity import identities

    assert target is not None
    identity = masked(identity_of(identities("benchmark", ("target", "serve", "hardware"), cfg, target)))
    found = measured_costs(store, identity)
    if not found:
        raise ConfigError(
            f"no benchmark of a chain was timed on this target, serve slot and hardware in {store.root}: run"
            f" stage=benchmark once, with any drafter, or give {BY_HAND}"
        )
    return found


def _taus(args: EstimateArgs, cfg: Config, target: Target | None, store: Store) -> tuple[dict[int, Interval], str]:
    """By number of drafts, and where they are from."""
    if args.survival is not None:
        try:
            return taus_of_survival(args.survival[: args.longest]), "from the survival given, without an interval"
        except ValueError as e:
            raise ConfigError(f"survival: {e}") from e
    from eagle3x import pipeline
    from eagle3x.data.shards import Shards
    from eagle3x.diagnosis.replay import ReplaySample, replay_lengths
    from eagle3x.drafters import checkpoint

    assert target is not None
    if cfg.drafter.source == "pretrained":
        raise ConfigError(
            "there is no val text beside a published drafter to replay it on: stage=diagnose does; or give"
            " survival=[...]"
        )
    found = pipeline.finished("drafter", cfg, target, store)
    if "drafter" not in found:
        raise ConfigError(
            f"no finished drafter of this config in {store.root}: run stage=drafter, or give survival=[...]"
        )
    samples = Shards(found["hidden_states"].path / "val")
    drafter = checkpoint.load(found["drafter"].path / "checkpoint", target).eval().requires_grad_(False)
    longest = min(args.longest, cfg.sampling.continuation_tokens)
    texts = (ReplaySample(s.id, s.token_ids, s.aux, s.prompt_tokens, s.response_tokens) for s in samples)
    counters = replay_lengths(drafter, texts, longest)
    bootstrap = Bootstrap(cfg.benchmark.resamples, cfg.benchmark.confidence, cfg.seed)
    ids = [s.id for s in samples]
    taus = {k: tau_interval(rows, ids, bootstrap) for k, rows in counters.items()}
    return taus, f"drafter {found['drafter'].key} by replay of the {len(ids)} val texts, which chose its checkpoint"


def _advice(found: Estimate, batch: int, k: int | None) -> str:
    if k is None:
        return "no k is worth a drafter"
    best = next(row for row in found.rows if (row.batch, row.num_speculative_tokens) == (batch, k))
    return f"k = {k} comes out best{'' if best.pays == 'yes' else '; whether it pays cannot be told'}"


def _figure(interval: Interval) -> str:
    return figure(interval) if interval.low < interval.high else f"{interval.value:.2f}"


def _cost(row: Row) -> str:
    return f"{_figure(row.step_cost)}{'' if row.cost_measured else '*'}"


def _times(interval: Interval) -> str:
    return times(interval) if interval.low < interval.high else times(interval).partition(" ")[0]
