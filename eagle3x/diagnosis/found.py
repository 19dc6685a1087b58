"""What the finder says of a drafter."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eagle3x.benchmark.statistics import Interval
from eagle3x.diagnosis.hypotheses import Hypothesis


@dataclass(frozen=True)
class Tried:
    """A hypothesis of the first round, alone.

    expected: log of the drafts accepted of the first two, were they drawn from the drafter (quick, on some rows).
    tau, gain over what the config says, p_adjusted: of those replayed in full; None for the others.
    """

    hypothesis: Hypothesis
    expected: float
    tau: float | None
    gain: Interval | None
    p_adjusted: float | None


@dataclass(frozen=True)
class Named:
    """A hypothesis that is shown. gain: the tau that is lost again if it alone is left out."""

    hypothesis: Hypothesis
    gain: Interval
    p_adjusted: float


@dataclass(frozen=True)
class Untold:
    """A change that helps, but no better than a `rival` of another kind in its place: either may be the cause."""

    hypothesis: Hypothesis
    rival: Hypothesis
    difference: Interval


@dataclass(frozen=True)
class Found:
    """What the finder says.

    claimed: boundaries by the config; None if nobody knows them. boundaries: those of the best reading.
    unsettled: with `claimed` None, other boundaries that do not differ visibly from these.
    tau: as the config says (claimed None: at the best boundaries). tau_named: with all that is `named`.
    tried: the first round, best first. hypotheses: how many were tried in all.
    embedding_likeness, head_likeness: median cosine of the drafter's own rows and the target's; None: no own ones.
    """

    claimed: tuple[int, ...] | None
    boundaries: tuple[int, ...]
    unsettled: tuple[tuple[int, ...], ...]
    tau: Interval
    tau_named: Interval
    named: tuple[Named, ...]
    untold: tuple[Untold, ...]
    tried: tuple[Tried, ...]
    hypotheses: int
    prompts: int
    embedding_likeness: float | None
    head_likeness: float | None
    other_target: bool

    @property
    def clear(self) -> bool:
        """Whether something is wrong and known."""
        return bool(self.named)

    @property
    def sentence(self) -> str:
        """The verdict in a line."""
        of = f"{self.hypotheses} hypotheses on {self.prompts} prompts"
        if self.other_target:
            return (
                f"made for another target, or hardly trained: tau {self.tau.value:.3f}, none of {of} helps, and its"
                " rows are unrelated to the target's"
            )
        if self.named:
            what = "; ".join(n.hypothesis.sentence for n in self.named)
            return f"{what}: tau {self.tau.value:.3f} -> {self.tau_named.value:.3f} ({of})"
        if self.untold:
            pairs = " and ".join(f"{u.hypothesis.name!r} from {u.rival.name!r}" for u in self.untold)
            return f"cannot tell {pairs}: both help ({of})"
        if self.claimed is None:
            more = f", as good as {len(self.unsettled)} other choices" if self.unsettled else ""
            listed = ", ".join(map(str, self.boundaries))
            return f"best at boundaries {listed}{more}: tau {self.tau.value:.3f}; nothing else helps ({of})"
        return f"none of {of} is shown to be better than what its config says, tau {self.tau.value:.3f}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""

        def told(h: Hypothesis) -> dict[str, str]:
            return {"kind": h.kind, "name": h.name, "sentence": h.sentence, "repair": h.repair}

        return {
            "claimed": None if self.claimed is None else list(self.claimed),
            "boundaries": list(self.boundaries),
            "unsettled": [list(b) for b in self.unsettled],
            "tau": asdict(self.tau),
            "tau_named": asdict(self.tau_named),
            "named": [{**told(n.hypothesis), "gain": asdict(n.gain), "p": n.p_adjusted} for n in self.named],
            "untold": [
                {**told(u.hypothesis), "rival": told(u.rival), "difference": asdict(u.difference)} for u in self.untold
            ],
            "tried": [
                {**told(t.hypothesis), "expected": t.expected, "tau": t.tau, "p": t.p_adjusted,
                 "gain": None if t.gain is None else asdict(t.gain)}
                for t in self.tried
            ],
            "hypotheses": self.hypotheses,
            "prompts": self.prompts,
            "embedding_likeness": self.embedding_likeness,
            "head_likeness": self.head_likeness,
            "other_target": self.other_target,
            "sentence": self.sentence,
        }  # fmt: skip
