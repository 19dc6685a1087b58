"""The serve probe: which boundaries does a running server feed its drafter? Told from counters alone.

A server shows no states, but at temperature 0 replay says, request by request, what it would count if it fed these
boundaries or those. So the counters of a few prompts are compared with replays at the boundaries that its config
predicts, at all of them one early, one late, and at the engine's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil, comb
from typing import Any, Literal

import numpy as np

from eagle3x.benchmark.bootstrap import Bootstrap, Interval, cluster_sums
from eagle3x.benchmark.statistics import EXACT_SHARE, agreement
from eagle3x.capture import CaptureError, default_boundaries
from eagle3x.types import SpecCounters

SIGNIFICANT = 0.05
LEAST_INFORMATIVE = 6
"""Conversations that must favour one side for a two-sided sign test at 0.05: 2 * 0.5**6 = 0.03."""

Boundaries = tuple[int, ...]
Verdict = Literal["matched", "wrong", "cannot tell"]


@dataclass(frozen=True)
class Fit:
    """How a candidate explains what was served.

    identical: requests whose V and every A_i are as replayed. paired_diff: tau served - tau replayed.
    informative: conversations that the predicted boundaries and this candidate explain unequally well, `better` of
    them better by this candidate; p_value: two-sided sign test of that.
    """

    boundaries: Boundaries
    identical: int
    paired_diff: Interval
    informative: int
    better: int
    p_value: float


@dataclass(frozen=True)
class ServeVerdict:
    """`fed`: the boundaries that the server feeds, None if that cannot be told."""

    predicted: Boundaries
    verdict: Verdict
    fed: Boundaries | None
    requests: int
    fits: tuple[Fit, ...]
    prompts_needed: int | None
    sentence: str

    @property
    def matched(self) -> bool:
        """Whether the server feeds what its config predicts."""
        return self.verdict == "matched"

    def describe(self) -> str:
        """The sentence, and a line for each candidate."""
        lines = [
            f"{list(fit.boundaries)}{' (predicted)' if fit.boundaries == self.predicted else ''}: counters equal in"
            f" {fit.identical} of {self.requests} requests; tau served - replayed = {fit.paired_diff.value:+.3f}"
            f" ({fit.paired_diff.low:+.3f} to {fit.paired_diff.high:+.3f})"
            for fit in self.fits
        ]
        return "\n  ".join([f"serve probe: {self.sentence}", *lines])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "verdict": self.verdict,
            "predicted": list(self.predicted),
            "fed": None if self.fed is None else list(self.fed),
            "requests": self.requests,
            "prompts_needed": self.prompts_needed,
            "sentence": self.sentence,
            "candidates": [{**asdict(fit), "boundaries": list(fit.boundaries)} for fit in self.fits],
        }


def candidates(predicted: Boundaries, num_blocks: int) -> list[Boundaries]:
    """The boundaries to replay at: predicted, all one early, all one late, the engines' default; as far as they exist.

    The default counts only if it has as many boundaries as the drafter reads.
    """
    found = [predicted, tuple(b - 1 for b in predicted), tuple(b + 1 for b in predicted)]
    with suppress(CaptureError):  # the target has too few blocks for a default
        found.append(default_boundaries(num_blocks))
    fits = [c for c in found if c[0] >= 0 and c[-1] <= num_blocks and len(c) == len(predicted)]
    return list(dict.fromkeys(fits))


def serve_verdict(
    served: Sequence[SpecCounters],
    replayed: Mapping[Boundaries, Sequence[SpecCounters]],
    predicted: Boundaries,
    prompts: Sequence[str],
    exact: bool = True,
    bootstrap: Bootstrap | None = None,
) -> ServeVerdict:
    """Which of the candidates in `replayed` the counters of `served` come from.

    Row i of all is the same request, `prompts[i]` its id.

    exact (float32 on a CPU): the predicted boundaries must replay at least 98 % of the requests to the counter, and no
    other candidate may. Else (bfloat16, where near-ties flip drafts), and where no candidate is exact: the candidate
    that explains single conversations better, by a sign test. Candidates that replay alike leave it open, and the
    verdict says how many prompts would tell them apart. Raises EagleError for fewer than two requests.
    """
    if predicted not in replayed or len(replayed) < 2:
        raise ValueError(f"replay at the predicted boundaries {predicted} and at another candidate")
    n = len(served)
    bootstrap = bootstrap or Bootstrap()
    misfits = {c: _misfits(served, rows, prompts) for c, rows in replayed.items()}
    fits: list[Fit] = []
    for candidate, rows in replayed.items():
        agreed = agreement(served, rows, prompts, True, bootstrap)
        better = sum(a < b for a, b in zip(misfits[candidate], misfits[predicted], strict=True))
        worse = sum(a > b for a, b in zip(misfits[candidate], misfits[predicted], strict=True))
        p_value = _sign_test(better, worse)
        fits.append(Fit(candidate, agreed.identical, agreed.paired_diff, better + worse, better, p_value))
    own = next(fit for fit in fits if fit.boundaries == predicted)
    others = sorted((fit for fit in fits if fit is not own), key=lambda fit: sum(misfits[fit.boundaries]))

    def result(verdict: Verdict, fed: Boundaries | None, sentence: str, needed: int | None = None) -> ServeVerdict:
        return ServeVerdict(predicted, verdict, fed, n, tuple(fits), needed, sentence)

    explained = [fit for fit in fits if exact and fit.identical >= EXACT_SHARE * n]
    if explained == [own]:
        return result("matched", predicted, f"matched, the server feeds {list(predicted)}")
    if explained and own not in explained:
        wrong = next(fit for fit in others if fit in explained)
        return result("wrong", wrong.boundaries, _wrong(predicted, wrong.boundaries))
    if not explained:
        nearer = [fit for fit in others if fit.p_value < SIGNIFICANT and 2 * fit.better > fit.informative]
        if nearer:
            return result("wrong", nearer[0].boundaries, _wrong(predicted, nearer[0].boundaries))
        if all(fit.p_value < SIGNIFICANT for fit in others):
            if not exact:
                return result("matched", predicted, f"matched, the server feeds {list(predicted)}")
            return result(
                "cannot tell",
                None,
                f"cannot tell: {list(predicted)} explain the counters best, but only {own.identical} of {n} requests;"
                " something else than the boundaries differs between server and replay",
            )
    alike = explained or [own, *(fit for fit in others if fit.p_value >= SIGNIFICANT)]
    conversations = len(misfits[predicted])
    needed = max(_prompts_needed(fit.informative, conversations) for fit in alike if fit is not own)
    names = " and ".join(str(list(fit.boundaries)) for fit in alike)
    return result("cannot tell", None, f"cannot tell: {names} replay alike; at least {needed} prompts needed", needed)


def _misfits(served: Sequence[SpecCounters], replayed: Sequence[SpecCounters], prompts: Sequence[str]) -> list[float]:
    """Per conversation the sum of the differences of V and of every A_i."""
    columns = [np.array([(c.verify_steps, *c.accepted_at) for c in rows]) for rows in (served, replayed)]
    misfits = np.abs(columns[0] - columns[1]).sum(1, keepdims=True)
    return cluster_sums(misfits, prompts)[:, 0].tolist()


def _sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of a fair coin."""
    n = wins + losses
    tail = sum(comb(n, i) for i in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def _prompts_needed(informative: int, conversations: int) -> int:
    """Prompts that would give enough informative ones at the share seen; none seen counts as one in one more."""
    share = informative / conversations if informative else 1 / (conversations + 1)
    return max(conversations + 1, ceil(LEAST_INFORMATIVE / share))


def _wrong(predicted: Boundaries, fed: Boundaries) -> str:
    shifts = {b - a for a, b in zip(predicted, fed, strict=True)}
    by = f" (each off by {shifts.pop():+d})" if len(shifts) == 1 else ""
    return f"WRONG, the config predicts {list(predicted)}, but the server's counters are those of {list(fed)}{by}"
