"""Are outputs the same with and without the drafter? Greedy speculation must not change a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3x.types import Completion, EagleError


@dataclass(frozen=True)
class Difference:
    """Two outputs that part at token `position` (0 = first output token); None: that output had ended.

    top2_gap: the target's top-2 logit gap there, None where the engine gives none. near_tie: the gap is below the
    limit, so rounding alone may choose. lossy: it is not, so the drafter changed the output.
    """

    id: str
    position: int
    baseline_token: int | None
    drafter_token: int | None
    top2_gap: float | None
    near_tie: bool
    lossy: bool


@dataclass(frozen=True)
class OutputComparison:
    """`rate`: share of equal outputs among `requests`."""

    requests: int
    rate: float
    differences: tuple[Difference, ...]

    @property
    def lossy(self) -> tuple[Difference, ...]:
        """The differences that no near tie explains."""
        return tuple(d for d in self.differences if d.lossy)


def compare_outputs(baseline: Sequence[Completion], drafter: Sequence[Completion], near_tie: float) -> OutputComparison:
    """Compare the outputs of the same requests. `near_tie`: top-2 logit gap below which outputs may part.

    Where no gap is known, a difference is neither called a near tie nor lossy.
    Raises EagleError if the two sides answered different requests.
    """
    without = {c.id: c for c in baseline}
    if sorted(without) != sorted(c.id for c in drafter) or not without:
        raise EagleError("outputs with and without the drafter are not of the same requests")
    found = [_difference(without[c.id], c, near_tie) for c in drafter if c.token_ids != without[c.id].token_ids]
    return OutputComparison(len(drafter), 1 - len(found) / len(drafter), tuple(found))


def _difference(baseline: Completion, drafter: Completion, near_tie: float) -> Difference:
    a, b = baseline.token_ids, drafter.token_ids
    shared = min(len(a), len(b))
    position = next((i for i in range(shared) if a[i] != b[i]), shared)
    # The text up to here is the same, so either side's gap is the target's; the plain decode's is the reference.
    gap = next(
        (gaps[position] for gaps in (baseline.top2_gaps, drafter.top2_gaps) if gaps and position < len(gaps)), None
    )
    return Difference(
        id=drafter.id,
        position=position,
        baseline_token=a[position] if position < len(a) else None,
        drafter_token=b[position] if position < len(b) else None,
        top2_gap=gap,
        near_tie=gap is not None and gap < near_tie,
        lossy=gap is not None and gap >= near_tie,
    )
