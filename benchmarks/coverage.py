"""How often a 95 % interval holds the truth, on simulated processes whose truth is known.

    python benchmarks/coverage.py [experiments=2000] [resamples=1000]

The process: each prompt has its own chance q that a draft is accepted, q ~ Beta(1.5, 4), and 15 to 44 verify steps of
3 drafts. Seeds move q on the log-odds scale by a normal of their own, and by another for each prompt. Times are
log-normal around each prompt's own. Truths come from moments where there are any, else from a million prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eagle3x.benchmark.bootstrap import Array, Bootstrap, Interval, interval
from eagle3x.benchmark.gaps import gap
from eagle3x.benchmark.seeds import pool
from eagle3x.benchmark.statistics import compare, tau_difference, tau_of_sums

DRAFTS = 3
Experiment = Callable[[np.random.Generator, int, Bootstrap], Interval]
"""A random state, a number of prompts and how intervals are made, to the interval of one simulated benchmark."""


def counted(rng: np.random.Generator, odds: Array, steps: Array) -> Array:
    """Verify steps and acceptances at each position, [..., N, 1 + DRAFTS], of prompts of log-odds [..., N]."""
    chance = 1 / (1 + np.exp(-odds))
    rows: list[Array] = [np.broadcast_to(steps, odds.shape)]
    for _ in range(DRAFTS):
        rows.append(rng.binomial(rows[-1].astype(np.int64), chance).astype(np.float64))
    return np.stack(rows, axis=-1)


def prompts(rng: np.random.Generator, n: int, a: float = 1.5, b: float = 4.0) -> tuple[Array, Array]:
    """Log-odds and verify steps of n prompts."""
    q = rng.beta(a, b, n)
    return np.log(q / (1 - q)), rng.integers(15, 45, n).astype(np.float64)


def tau_columns(rows: Array) -> Array:
    """[..., V, A_1, ..] to [..., A, V]."""
    return np.stack([rows[..., 1:].sum(-1), rows[..., 0]], axis=-1)


def share(top: int, bottom: int) -> Callable[[Array], Array]:
    """A ratio of two columns."""
    return lambda sums: sums[..., top] / sums[..., bottom]


def power_mean(power: int, a: float = 1.5, b: float = 4.0) -> float:
    """E[q^power] of q ~ Beta(a, b)."""
    return float(np.prod([(a + i) / (a + b + i) for i in range(power)]))


def one_tau(rng: np.random.Generator, n: int, bootstrap: Bootstrap) -> Interval:
    """Acceptance length."""
    return interval(tau_columns(counted(rng, *prompts(rng, n))), tau_of_sums, bootstrap)


def survival_3(rng: np.random.Generator, n: int, bootstrap: Bootstrap) -> Interval:
    """Survival at the third position, the rarest."""
    return interval(counted(rng, *prompts(rng, n)), share(3, 0), bootstrap)


def alpha_3(rng: np.random.Generator, n: int, bootstrap: Bootstrap) -> Interval:
    """Acceptance at the third position where it was reached."""
    return interval(counted(rng, *prompts(rng, n)), share(3, 2), bootstrap)


def speed_up(rng: np.random.Generator, n: int, bootstrap: Bootstrap) -> Interval:
    """Ratio of summed times, of prompts that gain unequally."""
    baseline = np.exp(rng.normal(0, 0.3, n))
    return interval(np.stack([baseline, baseline / np.exp(rng.normal(0.3, 0.25, n))], 1), share(0, 1), bootstrap)


def rate(rng: np.random.Generator, n: int, bootstrap: Bootstrap) -> Interval:
    """Tokens per second of requests of unequal length and speed."""
    tokens = rng.integers(10, 200, n).astype(np.float64)
    return interval(np.stack([tokens, tokens * np.exp(rng.normal(0, 0.3, n))], 1), share(0, 1), bootstrap)


def paired(rng: np.random.Generator, n: int, bootstrap: Bootstrap) -> Interval:
    """tau of a drafter - tau of one that is worse on the same prompts."""
    odds, steps = prompts(rng, n)
    worse = counted(rng, odds - 0.2 + rng.normal(0, 0.1, n), steps)
    sums = np.hstack([tau_columns(counted(rng, odds, steps)), tau_columns(worse)])
    return compare(sums, tau_difference, bootstrap).difference


def independent(rng: np.random.Generator, n: int, bootstrap: Bootstrap) -> Interval:
    """tau of n prompts - tau of 4 n other, harder ones."""
    groups = [counted(rng, *prompts(rng, n)), counted(rng, *prompts(rng, 4 * n, 1.2, 5.0))]
    return gap(tau_columns(groups[0]), tau_columns(groups[1]), tau_of_sums, bootstrap).difference


def seeded(rng: np.random.Generator, n: int, seeds: int, spread: float) -> Array:
    """[S, N, 2]: seeds that differ by `spread` on the log-odds scale, and by 0.2 more in each prompt."""
    odds, steps = prompts(rng, n)
    moved = odds + rng.normal(0, 1, (seeds, 1)) * spread + rng.normal(0, 0.2, (seeds, n))
    return tau_columns(counted(rng, moved, steps))


def over_seeds(seeds: int, spread: float) -> Experiment:
    """tau of a recipe over seeds and prompts."""
    return lambda rng, n, bootstrap: pool(seeded(rng, n, seeds, spread), tau_of_sums, bootstrap).figure


def prompts_alone(seeds: int, spread: float) -> Experiment:
    """The same with the seeds taken for all that there are: what pooling without them would say."""
    return lambda rng, n, bootstrap: interval(seeded(rng, n, seeds, spread).sum(0), tau_of_sums, bootstrap)


def simulated_tau(rows: Callable[[np.random.Generator], Array]) -> float:
    """tau of so many prompts that it is the truth."""
    return float(tau_of_sums(tau_columns(rows(np.random.default_rng(7))).sum(0)))


def truths() -> dict[str, tuple[Experiment, float]]:
    """Each process with the figure that its interval should hold."""
    first, second, third = (power_mean(i) for i in (1, 2, 3))
    tau = 1 + first + second + third
    harder = 1 + sum(power_mean(i, 1.2, 5.0) for i in (1, 2, 3))

    def worse(rng: np.random.Generator) -> Array:
        odds, steps = prompts(rng, 1_000_000)
        return counted(rng, odds - 0.2 + rng.normal(0, 0.1, len(odds)), steps)

    def moved(spread: float) -> Callable[[np.random.Generator], Array]:
        def rows(rng: np.random.Generator) -> Array:
            odds, steps = prompts(rng, 1_000_000)
            noise = rng.normal(0, 1, len(odds)) * spread + rng.normal(0, 0.2, len(odds))
            return counted(rng, odds + noise, steps)

        return rows

    found: dict[str, tuple[Experiment, float]] = {
        "tau": (one_tau, tau),
        "survival at 3": (survival_3, third),
        "alpha at 3": (alpha_3, third / second),
        "speed-up": (speed_up, float(np.exp(0.3 - 0.25**2 / 2))),
        "tokens per second": (rate, float(np.exp(-(0.3**2) / 2))),
        "paired difference of tau": (paired, tau - simulated_tau(worse)),
        "gap of tau, n and 4 n prompts": (independent, tau - harder),
    }
    for seeds, spread in ((3, 0.0), (3, 0.15), (3, 0.4), (2, 0.15), (5, 0.15)):
        found[f"tau over {seeds} seeds, spread {spread}"] = (over_seeds(seeds, spread), simulated_tau(moved(spread)))
    found["3 seeds, spread 0.4, prompts alone"] = (prompts_alone(3, 0.4), simulated_tau(moved(0.4)))
    return found


def covered(experiment: Experiment, truth: float, n: int, experiments: int, resamples: int) -> tuple[float, float]:
    """Share of intervals that hold the truth, and their mean half-width.

    Each experiment draws resamples of its own: shared ones would lend all of them one error of the quantiles.
    """
    made = [experiment(np.random.default_rng([n, i]), n, Bootstrap(resamples, 0.95, i + 1)) for i in range(experiments)]
    return float(np.mean([i.contains(truth) for i in made])), float(np.mean([i.half_width for i in made]))


def table(processes: Mapping[str, tuple[Experiment, float]], experiments: int, resamples: int) -> str:
    """Markdown: coverage in percent, and the mean half-width."""
    sizes = (12, 24, 48)
    lines = [f"| figure | {' | '.join(f'{n} prompts' for n in sizes)} |", f"| --- |{' --- |' * len(sizes)}"]
    for name, (experiment, truth) in processes.items():
        cells = []
        for n in sizes:
            hit, half = covered(experiment, truth, n, experiments, resamples)
            cells.append(f"{100 * hit:.1f} (±{half:.3f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table."""
    given: dict[str, Any] = {"experiments": 2000, "resamples": 1000}
    given |= {name: int(value) for name, _, value in (a.partition("=") for a in arguments)}
    print(table(truths(), **given))


if __name__ == "__main__":
    main(sys.argv[1:])
