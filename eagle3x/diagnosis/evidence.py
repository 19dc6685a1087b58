"""From evidence to causes: which of the things that differ explains what was lost on a rung."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.diagnosis.causes import Cause, Kind, distinct
from eagle3x.diagnosis.export_changes import Change
from eagle3x.diagnosis.found import Found
from eagle3x.diagnosis.ladder import LEAST_LOSS, SIGNIFICANT, Ladder, RungName, Step
from eagle3x.diagnosis.offset_quantization import OffsetQuantization

HEADER = 3
"""Tokens before a response that a template writes there: enough to tell two templates apart."""


@dataclass(frozen=True)
class SlotDifference:
    """What the extracting and the serving slot have apart: (what, theirs when extracting, when serving)."""

    what: str
    extract: str
    serve: str


@dataclass(frozen=True)
class Evidence:
    """All that was found.

    claimed, fed: boundaries trained on, and predicted to be fed. headers: the tokens before a response, in the text
    that the drafter learned from and in the text that was served. break_even: tau from which on speculation pays.
    finder: causes that replay under other readings of the drafter found (one that was trained here: before its export).
    gap: tau on held-out text - tau on train text. probe_fed: boundaries that the serve probe says are fed, if it
    contradicts `fed`.
    """

    ladder: Ladder
    claimed: tuple[int, ...] | None
    fed: tuple[int, ...] | None
    changes: tuple[Change, ...] = ()
    unloadable: str | None = None
    grid: OffsetQuantization | None = None
    slots: tuple[SlotDifference, ...] = ()
    headers: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    probe_fed: tuple[int, ...] | None = None
    served_limit: int | None = None
    longest: int = 0
    finder: tuple[Cause, ...] = ()
    break_even: float | None = None
    gap: Interval | None = None


def causes(evidence: Evidence) -> list[Cause]:
    """Every cause, those of broken rungs in the order of the ladder."""
    broken = {step.rung: step for step in evidence.ladder.broken}
    found: list[Cause] = []
    if evidence.unloadable is not None:
        found.append(Cause("unloadable", "exported", evidence.unloadable, None))
    if (step := broken.get("exported")) is not None:
        found += [Cause(change.kind, "exported", change.sentence, step.difference) for change in evidence.changes]
    found += evidence.finder
    if (step := broken.get("responses")) is not None:
        found.append(_text(evidence, step))
    found += _states(evidence, broken.get("states"))
    if (step := broken.get("served")) is not None:
        found.append(_engine(evidence, step))
    found += _training(evidence)
    return distinct(found)


def finder_causes(found: Found, rung: RungName = "exported") -> tuple[Cause, ...]:
    """What replay under other readings of the drafter showed, as causes that show on `rung`."""
    named = [
        Cause(n.hypothesis.kind, rung, n.hypothesis.sentence, _negated(n.gain), n.hypothesis.repair)
        for n in found.named
    ]
    return (*named, *([Cause("other_target", rung, found.sentence, None)] if found.other_target else []))


def _negated(gain: Interval) -> Interval:
    return Interval(-gain.value, -gain.high, -gain.low)


def header(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tokens that most prompts end with."""
    return Counter(tuple(p[-HEADER:]) for p in prompts).most_common(1)[0][0]


def _text(evidence: Evidence, step: Step) -> Cause:
    if evidence.headers is not None and evidence.headers[0] != evidence.headers[1]:
        learned, served = evidence.headers
        sentence = f"prompts end with tokens {list(served)}, in the train text with {list(learned)}: another template"
        return Cause("wrong_template", "responses", sentence, step.difference)
    quantized = [slot for slot in evidence.slots if slot.what == "quantization"]
    if quantized:
        sentence = f"a target served with quantization={quantized[0].serve} writes other text"
        return Cause("quantized_text", "responses", sentence, step.difference)
    return Cause("other_text", "responses", "the served target writes other text than the eval text", step.difference)


def _states(evidence: Evidence, step: Step | None) -> list[Cause]:
    """The offset if it is fed wrong and costs something; the rest of what the rung lost by what differs."""
    grid, found = evidence.grid, []
    offset_lost = 0.0
    if grid is not None and not grid.hypothetical and grid.p_holm[0] < SIGNIFICANT and grid.offset.difference.value < 0:
        lost = grid.offset.difference
        if step is not None or -lost.value >= LEAST_LOSS:
            sentence = f"boundaries {list(grid.shifted)} are fed, trained were {list(grid.right)}"
            found.append(Cause("offset_serving", "states", sentence, lost))
            offset_lost = lost.value
    if step is None:
        return found
    if grid is not None:
        significant = grid.p_holm[1] < SIGNIFICANT and -grid.states.difference.value >= LEAST_LOSS
        rest = grid.states.difference
    else:
        significant, rest = step.difference.value - offset_lost <= -LEAST_LOSS, step.difference
    if significant or not found:
        found.append(_drift(evidence, rest))
    return found


def _drift(evidence: Evidence, lost: Interval) -> Cause:
    by_what: dict[str, Kind] = {"quantization": "quantized_states", "attention": "attention", "engine": "engine_states"}
    for what, kind in by_what.items():
        for slot in evidence.slots:
            if slot.what == what:
                others = [f"{s.what} {s.extract} / {s.serve}" for s in evidence.slots if s is not slot]
                also = f" (they also differ in {', '.join(others)})" if others else ""
                return Cause(kind, "states", f"states of {what}={slot.serve}, trained {slot.extract}{also}", lost)
    return Cause("engine_states", "states", "the serving engine's states are not the extracting engine's", lost)


def _engine(evidence: Evidence, step: Step) -> Cause:
    if evidence.probe_fed is not None:
        fed, predicted = list(evidence.probe_fed), list(evidence.fed or ())
        sentence = f"the counters are those of boundaries {fed}, predicted {predicted}"
        return Cause("offset_serving", "served", sentence, step.difference)
    if evidence.served_limit is not None and evidence.served_limit < evidence.longest:
        sentence = f"max_position_embeddings={evidence.served_limit}, but texts have up to {evidence.longest} tokens"
        return Cause("max_positions", "served", sentence, step.difference)
    tau = next(t for r, t in zip(evidence.ladder.rungs, evidence.ladder.taus, strict=True) if r.name == "served")
    if tau is not None and tau.value == 1.0:
        sentence = "not one draft was accepted, though replay on its own states accepts some: not EAGLE-3 at work"
        return Cause("wrong_algorithm", "served", sentence, step.difference)
    return Cause("engine", "served", "the engine accepts less than its own states explain", step.difference)


def _training(evidence: Evidence) -> list[Cause]:
    """A first rung that does not pay. If the drafter knows its train text far better, more text is what it lacks: such
    a gap alone is no fault, since held-out text may gain from the same epochs."""
    rungs = zip(evidence.ladder.rungs, evidence.ladder.taus, strict=True)
    rung, tau = next((rung.name, tau) for rung, tau in rungs if tau is not None)
    if evidence.break_even is None or tau.high >= evidence.break_even:
        return []
    sentence = f"tau {tau.value:.2f} is below {evidence.break_even:.2f}, from where on speculation pays here"
    gap = evidence.gap
    if gap is not None and gap.high < 0 and -gap.value >= max(LEAST_LOSS, tau.value - 1):
        return [Cause("overfit", rung, f"{sentence}, and train text has {-gap.value:.2f} more", None)]
    return [Cause("weak_drafter", rung, sentence, None)]
