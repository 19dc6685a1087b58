"""How much of the eval text is accepted: trained drafters of three seeds, their untrained start, and bigrams.

    python benchmarks/drafter_quality.py [overrides]

tau is replayed on the target's greedy text of the held-out prompts, from states that the extraction wrote. Everybody
walks the same text with the same number of drafts, so all comparisons are paired by prompt and by seed; intervals are
for other prompts and other seeds. Prints Markdown.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from eagle3x import composition, pipeline, targets
from eagle3x.artifacts import Store
from eagle3x.benchmark.bootstrap import Bootstrap
from eagle3x.benchmark.degenerate import degenerate_from
from eagle3x.benchmark.metrics import acceptance
from eagle3x.benchmark.seeds import compare_pooled, pool_tau
from eagle3x.data.shards import Sample, Shards
from eagle3x.diagnosis.replay import VerifyStep, counters, walk
from eagle3x.drafters import checkpoint
from eagle3x.training import train
from eagle3x.training.validation import replayed
from eagle3x.types import SpecCounters

SEEDS = (1, 2, 3)
REQUIRED_TAU, REQUIRED_LOW = 1.25, 1.1


@dataclass(frozen=True)
class Contestant:
    """Counters on the eval samples, all samples of one seed after those of another; tau on the val split, seconds."""

    name: str
    counters: Sequence[SpecCounters]
    note: str

    def by_seed(self, rows: Sequence[int], samples: int) -> list[list[SpecCounters]]:
        """Each seed's counters of the samples in `rows`."""
        return [[self.counters[seed * samples + i] for i in rows] for seed in range(len(SEEDS))]


class Bigrams:
    """After each token the one that followed it most often in the train responses; else the most frequent token."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        follow: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for sample in samples:
            tokens = sample.token_ids.tolist()
            for position in torch.nonzero(sample.loss_mask)[:, 0].tolist():
                follow[tokens[position - 1]][tokens[position]] += 1
        self.best: Mapping[int, int] = {token: _commonest(counts) for token, counts in follow.items()}
        self.fallback = _commonest(sum(follow.values(), Counter()))

    def accepted(self, text: Sequence[int], anchor: int, k: int) -> int:
        """How many of k drafts after `anchor` the text confirms."""
        token = text[anchor]
        for count in range(k):
            token = self.best.get(token, self.fallback)
            if text[anchor + 1 + count] != token:
                return count
        return k

    def replayed(self, samples: Sequence[Sample], k: int) -> list[SpecCounters]:
        """As `eagle3x.diagnosis.replay`: one verify step after another until the response is out."""
        result = []
        for sample in samples:
            text, first = sample.token_ids.tolist(), sample.prompt_tokens
            accepted = [self.accepted(text, first + row, k) for row in range(sample.response_tokens - 1)]
            result.append(counters([VerifyStep(first + row, accepted[row], 0.0) for row in walk(accepted)], k))
        return result


def _commonest(counts: Counter[int]) -> int:
    return min(counts, key=lambda token: (-counts[token], token))


def contestants(overrides: Sequence[str]) -> tuple[list[Contestant], list[Sample], Bootstrap]:
    """Train once per seed on the same states and replay everybody on the eval split."""
    cell = composition.cells(overrides, multirun=False)[0]
    cfg = cell.config
    target, store = targets.resolve(cfg.target), Store(Path(cfg.artifacts))
    *_, states = pipeline.run("hidden_states", cfg, cell.snapshot, target, store)
    data, held_out = Shards(states.path / "train"), list(Shards(states.path / "eval"))
    samples, _ = train.with_labels(data)
    k = cfg.speculation.num_speculative_tokens
    trained, untrained = [], []
    for seed in SEEDS:
        start = train.initial_drafter(cfg.drafter, target, data, samples, seed, train.devices_of(cfg.hardware)[0])
        untrained += replayed(start, held_out, k)
        with TemporaryDirectory() as work:
            run = pipeline.StageRun(
                replace(cfg, seed=seed), Path(work), {"hidden_states": states}, target, {"extract": cfg.extract_slot}
            )
            began = time.monotonic()
            facts = train.make(run)
            seconds = time.monotonic() - began
            drafter = checkpoint.load(Path(work) / train.CHECKPOINT, target)
        own = replayed(drafter, held_out, k)
        trained += own
        print(
            f"seed {seed}: tau {acceptance(own).tau:.3f} on eval, {facts['val_tau']:.3f} on val (step"
            f" {facts['best_step']} of {facts['steps']}), {seconds:.0f} s, {facts['tokens_per_second']:.0f} tok/s,"
            f" {facts['flops_per_token'] * facts['tokens'] / 1e12:.2f} TFLOP",
            file=sys.stderr,
        )
    bigrams = Bigrams(samples).replayed(held_out, k) * len(SEEDS)
    everybody = [
        Contestant("trained", trained, f"seeds {', '.join(map(str, SEEDS))}"),
        Contestant("untrained warm start", untrained, "the same seeds, before the first step"),
        Contestant("bigrams", bigrams, "of the train responses"),
    ]
    bootstrap = Bootstrap(cfg.benchmark.resamples, cfg.benchmark.confidence, cfg.seed)
    return everybody, held_out, bootstrap


def table(everybody: Sequence[Contestant], held_out: Sequence[Sample], bootstrap: Bootstrap) -> str:
    """Markdown, over all prompts and without those whose text ends in a loop; says whether the requirement is met."""
    everything = list(range(len(held_out)))
    sound = [i for i in everything if _loops(held_out[i]) is None]
    lines = []
    met = True
    for title, rows in (("all eval prompts", everything), ("without degenerate tails", sound)):
        names = [held_out[i].id for i in rows]
        lines += [
            f"### {title} ({len(names)} prompts)", "",
            "| drafter | tau | survival | trained - this |", "| --- | --- | --- | --- |",
        ]  # fmt: skip
        ours = everybody[0].by_seed(rows, len(held_out))
        for one in everybody:
            theirs = one.by_seed(rows, len(held_out))
            tau = pool_tau(theirs, names, bootstrap).figure
            survival = ", ".join(f"{s:.3f}" for s in acceptance([c for seed in theirs for c in seed]).survival)
            difference = ""
            if one is not everybody[0]:
                paired = compare_pooled(ours, theirs, names, bootstrap).figure
                difference = f"{paired.value:+.3f} ({paired.low:+.3f} to {paired.high:+.3f})"
                met = met and paired.low > 0
            else:
                met = met and tau.value >= REQUIRED_TAU and tau.low > REQUIRED_LOW
            shown = f"{tau.value:.3f} ({tau.low:.3f} to {tau.high:.3f})"
            lines.append(f"| {one.name} ({one.note}) | {shown} | {survival} | {difference} |")
        lines.append("")
    wanted = f"tau at least {REQUIRED_TAU}, lower end above {REQUIRED_LOW}, above both baselines"
    lines.append(f"{'Met' if met else 'NOT met'}: {wanted}.")
    return "\n".join(lines)


def _loops(sample: Sample) -> int | None:
    first = sample.prompt_tokens
    return degenerate_from(sample.token_ids[first : first + sample.response_tokens].tolist())


if __name__ == "__main__":
    print(table(*contestants(sys.argv[1:])))
