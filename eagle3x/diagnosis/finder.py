"""The finder: for a drafter whose convention is unknown, which single changes of how it is fed or read repair it.

    reading (as its config says) --try all hypotheses--> the best ones replayed --shown?--> reading' --try all again ...

1. Every hypothesis gets a quick figure (`Bench.expected`); the best few, of several kinds, are replayed on all texts.
2. The one with the largest tau is taken if its gain is shown. If none is, the one with the largest quick figure is
   taken on trial: with two faults at once no single repair need change tau.
3. The next round starts from there, at most `ROUNDS` times.
4. Of the changes taken, one is *named* if leaving it out loses tau again, by at least max(0.02, 5 % of tau - 1) and
   with a p-value, adjusted for all hypotheses that were tried, below 0.05; and if the best change of another kind in
   its place is worse.

A drafter that is right but weak names nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from eagle3x.benchmark.statistics import Bootstrap, holm
from eagle3x.diagnosis import vocabulary_maps
from eagle3x.diagnosis.captured_text import CapturedText
from eagle3x.diagnosis.found import Found, Named, Tried, Untold
from eagle3x.diagnosis.hypotheses import Hypothesis, Kind, Reading, hypotheses, offset, offsets, readable, usual_choices
from eagle3x.diagnosis.reading_bench import Bench, Gain
from eagle3x.diagnosis.vocabulary_maps import VocabularyKind
from eagle3x.drafters.checkpoint import EMBEDDING, UNRELATED, Published
from eagle3x.targets import Target
from eagle3x.types import EagleError, SpecCounters

ROUNDS = 3
FINALISTS, OF_ONE_KIND = 6, 3
"""How many hypotheses of a round are replayed in full, and how many of them may be of the same kind."""
PROMISING = 0.095
"""A change is taken on trial if the quick figure, a logarithm, grows by a tenth."""
ALPHA = 0.05
LEAST_GAIN, LEAST_SHARE = 0.02, 0.05
NOTHING_ACCEPTED = 1.1
"""A drafter whose tau is surely below this may be another target's."""


@dataclass(frozen=True)
class _Candidate:
    hypothesis: Hypothesis
    expected: float
    counters: list[SpecCounters] | None = None
    gain: Gain | None = None
    p_adjusted: float | None = None


@dataclass(frozen=True)
class _Taken:
    """A change, and the best one of another kind in the same round."""

    hypothesis: Hypothesis
    rival: Hypothesis | None


def find(
    published: Published,
    target: Target,
    texts: Sequence[CapturedText],
    claimed: tuple[int, ...] | None,
    num_speculative_tokens: int,
    bootstrap: Bootstrap,
) -> Found:
    """What is wrong with the drafter, if anything is: tried on `texts`, which hold the boundaries that they hold.

    claimed: the boundaries that its config says; None where nobody knows. `hypotheses.boundaries_needed` says what to
    capture. With fewer than a dozen texts nothing can be shown.

    Raises EagleError for fewer than two texts that have a verify step, for texts without the claimed boundaries, and
    for a checkpoint that is broken in another way than its vocabulary map or the norms before fc.
    """
    usable = [_after_final_norm(text, target) for text in texts if text.text.response_tokens > 1]
    if len(usable) < 2:
        raise EagleError(f"the finder needs at least 2 texts of more than one response token, not {len(usable)}")
    return _Search(published, target, Bench(target, usable, num_speculative_tokens, bootstrap)).run(claimed)


class _Search:
    def __init__(self, original: Published, target: Target, bench: Bench) -> None:
        self.original, self.target, self.bench = original, target, bench
        self.captured = bench.texts[0].boundaries
        self.tried = 0
        tensors = dict(readable(original).tensors)
        if EMBEDDING not in tensors and original.arch.hidden_size == target.hidden_size:
            tensors[EMBEDDING] = target.embedding()  # read once, not for every hypothesis
        self.published = replace(
            original, tensors={n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        )

    def run(self, claimed: tuple[int, ...] | None) -> Found:
        start = Reading(self.published, claimed or self._start())
        if not set(start.boundaries) <= set(self.captured):
            raise EagleError(f"the texts hold boundaries {list(self.captured)}, not {list(start.boundaries)}")
        before = self.bench.counters(start)
        taken, first = self._rounds(start, before)
        boundaries = next((t.hypothesis.boundaries for t in reversed(taken) if t.hypothesis.boundaries), None)
        if claimed is None and boundaries is not None:
            # Where nobody claims boundaries, better ones are no fault: they are where the search should have started.
            taken = [t for t in taken if t.hypothesis.boundaries is None]
            start = Reading(self.published, boundaries)
            before = self.bench.counters(start)
        named, untold = self._necessary(start, _merged(taken, start.boundaries))
        reading = _under(start, [n.hypothesis for n in named])
        after = self.bench.counters(reading) if named else before
        unsettled = self._unsettled(reading, after) if claimed is None else ()
        embedding, head = self._likenesses()
        tau = self.bench.tau(before)
        alone = tau.high < NOTHING_ACCEPTED and not named and not untold
        related = [likeness for likeness in (embedding, head) if likeness is not None]
        return Found(
            claimed=claimed,
            boundaries=reading.boundaries,
            unsettled=unsettled,
            tau=tau,
            tau_named=self.bench.tau(after),
            named=tuple(named),
            untold=tuple(untold),
            tried=tuple(self._tried(c) for c in _ranked(first)),
            hypotheses=self.tried,
            prompts=len(self.bench.texts),
            embedding_likeness=embedding,
            head_likeness=head,
            other_target=alone and bool(related) and max(related) < UNRELATED,
        )

    def _start(self) -> tuple[int, ...]:
        """The best of the usual boundaries and those around them."""
        width = self.original.arch.num_aux
        usual = [b for b in usual_choices(self.target) if len(b) == width and set(b) <= set(self.captured)]
        if not usual:
            raise EagleError(f"the texts hold boundaries {list(self.captured)}, none that drafters are trained on")
        around = [h.boundaries for b in usual for h in offsets(Reading(self.published, b), self.target, self.captured)]
        choices = list(dict.fromkeys([*usual, *(b for b in around if b is not None)]))
        self.tried += len(choices)
        return max(choices, key=lambda b: self.bench.expected(Reading(self.published, b)))

    def _rounds(self, start: Reading, before: list[SpecCounters]) -> tuple[list[_Taken], list[_Candidate]]:
        """The changes taken, one each round, and the first round's candidates."""
        taken: list[_Taken] = []
        first: list[_Candidate] = []
        reading, now = start, before
        for number in range(ROUNDS):
            tau = self.bench.tau(now).value
            if number > 0 and self.bench.k + 1 - tau < LEAST_GAIN:
                break  # nothing is left to gain
            candidates = self._round(reading, now)
            if number == 0:
                first = candidates
            best = _ranked(candidates)[0]
            assert best.gain is not None, "the first of a ranking was replayed"
            if not _shown(best.gain, best.p_adjusted or 0.0, tau):
                best = candidates[0]
                if best.expected < self.bench.expected(reading) + PROMISING:
                    break
            assert best.counters is not None, "the quick figure's first is a finalist"
            others = [c for c in _ranked(candidates) if _about(c.hypothesis) != _about(best.hypothesis)]
            taken.append(_Taken(best.hypothesis, others[0].hypothesis if others else None))
            reading, now = reading.under(best.hypothesis), best.counters
        return taken, first

    def _round(self, reading: Reading, now: list[SpecCounters]) -> list[_Candidate]:
        """All single changes of a reading, by their quick figure; the finalists with their counters."""
        every = hypotheses(reading, self.original, self.target, self.captured, self.bench.k)
        self.tried += len(every)
        quick = [_Candidate(h, self.bench.expected(reading.under(h))) for h in every]
        quick.sort(key=lambda c: -c.expected)
        replayed: dict[int, tuple[list[SpecCounters], Gain]] = {}
        of_kind: dict[Kind, int] = {}
        for place, candidate in enumerate(quick):
            kind = candidate.hypothesis.kind
            if len(replayed) < FINALISTS and of_kind.get(kind, 0) < OF_ONE_KIND:
                of_kind[kind] = of_kind.get(kind, 0) + 1
                counters = self.bench.counters(reading.under(candidate.hypothesis))
                replayed[place] = counters, self.bench.gain(counters, now)
        p_values = holm([replayed[i][1].p_value if i in replayed else 1.0 for i in range(len(quick))])
        return [
            replace(c, counters=replayed[i][0], gain=replayed[i][1], p_adjusted=p_values[i]) if i in replayed else c
            for i, c in enumerate(quick)
        ]

    def _necessary(self, start: Reading, taken: list[_Taken]) -> tuple[list[Named], list[Untold]]:
        """The changes without which tau is lost again, and those that a change of another kind could replace."""
        gains: list[Named] = []
        while taken:
            together = [t.hypothesis for t in taken]
            full = self.bench.counters(_under(start, together))
            gains = []
            for i, hypothesis in enumerate(together):
                without = self.bench.counters(_under(start, together[:i] + together[i + 1 :]))
                gain = self.bench.gain(full, without)
                p = min(1.0, gain.p_value * self.tried)
                if _shown(gain, p, self.bench.tau(without).value):
                    gains.append(Named(hypothesis, gain.difference, p))
            if len(gains) == len(taken):
                break
            kept = {id(g.hypothesis) for g in gains}
            spare = [t for t in taken if id(t.hypothesis) not in kept]
            taken = [t for t in taken if t is not spare[-1]]  # the last one taken was seen with all others in place
        else:
            return [], []
        about = {_about(t.hypothesis) for t in taken}
        named, untold = [], []
        for i, (one, gain) in enumerate(zip(taken, gains, strict=True)):
            if one.rival is not None and _about(one.rival) not in about:
                replaced = [t.hypothesis for t in taken[:i]] + [one.rival] + [t.hypothesis for t in taken[i + 1 :]]
                rival = self.bench.gain(full, self.bench.counters(_under(start, replaced)))
                if rival.difference.value <= 0 or rival.p_value >= ALPHA:
                    untold.append(Untold(one.hypothesis, one.rival, rival.difference))
                    continue
            named.append(gain)
        return named, untold

    def _unsettled(self, reading: Reading, now: list[SpecCounters]) -> tuple[tuple[int, ...], ...]:
        """Boundaries that replay does not show to be worse than those of the reading."""
        others = [reading.under(h) for h in offsets(reading, self.target, self.captured)]
        self.tried += len(others)
        nearest = sorted(others, key=lambda r: -self.bench.expected(r))[:OF_ONE_KIND]
        gains = [self.bench.gain(now, self.bench.counters(r)) for r in nearest]
        worse = [g.difference.value > 0 and p < ALPHA
                 for g, p in zip(gains, holm([g.p_value for g in gains]), strict=True)]  # fmt: skip
        return tuple(r.boundaries for r, told in zip(nearest, worse, strict=True) if not told)

    def _likenesses(self) -> tuple[float | None, float | None]:
        own = self.original.tensors.get(EMBEDDING)
        embedding = None
        if own is not None and own.shape[1] == self.target.hidden_size:
            rows = torch.nn.functional.cosine_similarity(own.float(), self.target.embedding(), dim=1)
            embedding = float(rows.median())
        ids = vocabulary_maps.read(self.published)
        return embedding, None if ids is None else vocabulary_maps.likeness(self.published, ids, self.target)

    def _tried(self, c: _Candidate) -> Tried:
        if c.counters is None or c.gain is None:
            return Tried(c.hypothesis, c.expected, None, None, None)
        return Tried(c.hypothesis, c.expected, self.bench.tau(c.counters).value, c.gain.difference, c.p_adjusted)


def _about(hypothesis: Hypothesis) -> str:
    """Its kind; maps of the vocabulary, which may differ in rows that are never drafted, are one."""
    return "vocabulary" if hypothesis.kind in get_args(VocabularyKind) else hypothesis.kind


def _shown(gain: Gain, p_adjusted: float, tau: float) -> bool:
    """A gain over `tau` that is neither chance nor too small to matter."""
    return p_adjusted < ALPHA and gain.difference.value >= max(LEAST_GAIN, LEAST_SHARE * (tau - 1))


def _ranked(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Those that were replayed by their gain, the largest first, then the others by their quick figure."""
    return sorted(
        candidates, key=lambda c: (c.gain is None, 0.0 if c.gain is None else -c.gain.difference.value, -c.expected)
    )


def _merged(taken: Sequence[_Taken], before: tuple[int, ...]) -> list[_Taken]:
    """Boundaries that were approached in several rounds are one change."""
    *earlier, last = [t for t in taken if t.hypothesis.boundaries is not None] or [None]
    if last is None or last.hypothesis.boundaries is None:
        return list(taken)
    listed = ", ".join(map(str, before))
    final = replace(last, hypothesis=offset(last.hypothesis.boundaries, f"its config says {listed}"))
    return [final if t is last else t for t in taken if t not in earlier]


def _under(start: Reading, changes: Sequence[Hypothesis]) -> Reading:
    for change in changes:
        start = start.under(change)
    return start


def _after_final_norm(text: CapturedText, target: Target) -> CapturedText:
    """The text with its last hidden states after the final norm, whichever side of it the engine hands over."""
    if text.last_norm == "post_norm":
        return text
    last = text.last.float()
    normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + target.rms_norm_eps) * target.final_norm()
    return replace(text, last=normed, last_norm="post_norm")
