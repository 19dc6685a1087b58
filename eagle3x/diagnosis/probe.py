"""The capture probe: are the states that an engine captures the boundaries that were asked for? Decided by content.

A few dozen tokens go through the engine's capture path and through a transformers forward in float32. Each captured
column is compared with every boundary and with everything that a wrong capture could take for it; the nearest is named.

Targets have massive activations (values of 25,000 at sink tokens), beside which a wrong layer looks like rounding. So
nothing here is a maximum: errors are per token, relative to the captured vector, and figures are medians over tokens
without the first ones.

Shapes: T tokens, H hidden, n blocks, C candidates, A boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from eagle3x.diagnosis.reference import Candidate, Reference, reference_states
from eagle3x.types import EagleError, LastNorm, TokenSample

if TYPE_CHECKING:
    from eagle3x.engines.base import Engine
    from eagle3x.targets import Target

LEFT_OUT = 4
"""First tokens that are not compared: attention sinks live there."""
LEAST_TOKENS = 16
FAR = 0.9
"""Median relative error from which on nothing is near: a vector of zeros is at 1."""
SURE = 0.9
"""Share of tokens in which the nearest candidate must be nearer than the runner-up."""
ALIKE = 1e-4
"""Candidates that differ by less than this relative error cannot be told apart, and need not be."""

Verdict = Literal["matched", "wrong", "cannot tell"]


@dataclass(frozen=True)
class Finding:
    """What a column is.

    nearest: None if every candidate is far. alike: candidates that are the same vectors on this target.
    error, cosine: medians over tokens of |c - r| / |c| and of the cosine. runner_up: the nearest different candidate.
    share: of the tokens, in how many `nearest` is nearer than `runner_up`.
    """

    expected: Candidate
    nearest: Candidate | None
    alike: tuple[Candidate, ...]
    error: float
    cosine: float
    runner_up: Candidate
    runner_up_error: float
    share: float

    @property
    def verdict(self) -> Verdict:
        """`cannot tell` if too few tokens agree on what is nearest."""
        if self.nearest is None:
            return "wrong"
        if self.share < SURE:
            return "cannot tell"
        return "matched" if self.expected in (self.nearest, *self.alike) else "wrong"

    def __str__(self) -> str:
        figures = f"relative error {self.error:.2g}, next {self.runner_up_error:.2g}: {self.runner_up}"
        if self.nearest is None:
            return f"wanted {self.expected}: nothing is near ({figures})"
        match self.verdict:
            case "matched":
                return f"{self.expected} ({figures})"
            case "wrong":
                return f"wanted {self.expected}, got {self.nearest} ({figures})"
            case "cannot tell":
                return (
                    f"wanted {self.expected}: cannot tell {self.nearest} from {self.runner_up}"
                    f" ({self.share:.0%} of tokens nearer; {figures})"
                )


@dataclass(frozen=True)
class CaptureVerdict:
    """Columns of a capture in their order, and the last hidden state."""

    boundaries: tuple[int, ...]
    columns: tuple[Finding, ...]
    last: Finding
    last_norm: LastNorm
    tokens: int

    @property
    def matched(self) -> bool:
        """Whether everything is what was asked for."""
        return self.verdict == "matched"

    @property
    def verdict(self) -> Verdict:
        """The worst of the columns' and the last hidden state's."""
        verdicts = {finding.verdict for finding in (*self.columns, self.last)}
        return "wrong" if "wrong" in verdicts else "cannot tell" if "cannot tell" in verdicts else "matched"

    @property
    def found(self) -> tuple[int, ...] | None:
        """The boundaries that were captured, in column order; None if a column is no boundary's stream."""
        streams = [f.expected if f.verdict == "matched" else f.nearest for f in self.columns]
        boundaries = tuple(c.boundary for c in streams if c is not None and c.kind == "stream")
        return boundaries if len(boundaries) == len(self.columns) else None

    @property
    def permuted(self) -> bool:
        """Whether the right boundaries came in another order."""
        return self.found is not None and self.found != self.boundaries and sorted(self.found) == list(self.boundaries)

    def describe(self) -> str:
        """A headline, and a line for each column."""
        asked = list(self.boundaries)
        if self.matched:
            head = f"capture probe: matched, boundaries {asked} and the {self.last_norm} last hidden state"
        elif self.verdict == "cannot tell":
            head = f"capture probe: cannot tell whether boundaries {asked} were captured; probe more tokens"
        elif self.permuted:
            head = f"capture probe: WRONG, columns are permuted: asked for {asked}, got {list(self.found or ())}"
        elif self.found is not None and self.found != self.boundaries:
            shifts = {found - asked for found, asked in zip(self.found, self.boundaries, strict=True)}
            by = f", each off by {shifts.pop():+d}" if len(shifts) == 1 else ""
            head = f"capture probe: WRONG, asked for boundaries {asked}, got {list(self.found)}{by}"
        else:
            head = f"capture probe: WRONG, not what was asked for (boundaries {asked}, {self.last_norm})"
        lines = [f"column {i}: {finding}" for i, finding in enumerate(self.columns)]
        return "\n  ".join([f"{head}; {self.tokens} tokens", *lines, f"last hidden state: {self.last}"])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""

        def plain(finding: Finding) -> dict[str, Any]:
            named = {"nearest": str(finding.nearest) if finding.nearest else None, "runner_up": str(finding.runner_up)}
            alike = [str(candidate) for candidate in finding.alike]
            return {**asdict(finding), "expected": str(finding.expected), **named, "alike": alike,
                    "verdict": finding.verdict}  # fmt: skip

        return {
            "verdict": self.verdict,
            "boundaries": list(self.boundaries),
            "found": None if self.found is None else list(self.found),
            "columns": [plain(finding) for finding in self.columns],
            "last": plain(self.last),
            "last_norm": self.last_norm,
            "tokens": self.tokens,
        }


def probe_capture(
    engine: Engine, target: Target, boundaries: Sequence[int], token_ids: Sequence[int]
) -> CaptureVerdict:
    """Run `token_ids` through the engine's capture and compare with the reference.

    A shorter sample travels in the same batch, because engines have been seen to mix up the states of a batch: being
    a prefix, it has the same reference. The worse of the two is returned. Raises EagleError if what the engine hands
    over is not comparable: other tokens, another shape, values that are not finite.
    """
    if len(token_ids) < LEFT_OUT + LEAST_TOKENS:
        raise EagleError(f"the capture probe needs at least {LEFT_OUT + LEAST_TOKENS} tokens, not {len(token_ids)}")
    whole = TokenSample("probe", tuple(token_ids))
    part = TokenSample("probe-part", whole.token_ids[: max(len(token_ids) * 2 // 3, LEFT_OUT + LEAST_TOKENS)])
    asked = {sample.id: sample for sample in (whole, part)}
    reference = reference_states(target, whole.token_ids)
    verdicts: dict[str, CaptureVerdict] = {}
    for states in engine.capture([whole, part], boundaries):
        if states.id not in asked or states.token_ids != asked[states.id].token_ids:
            raise EagleError(f"capture probe: the engine returned states of other tokens than were asked ({states.id})")
        verdicts[states.id] = judge(states.aux, states.last, states.last_norm, boundaries, reference)
    if set(verdicts) != set(asked):
        raise EagleError(f"capture probe: the engine returned {len(verdicts)} of {len(asked)} samples")
    order: list[Verdict] = ["wrong", "cannot tell", "matched"]
    return min((verdicts[i] for i in asked), key=lambda v: order.index(v.verdict))


def judge(
    aux: Tensor, last: Tensor, last_norm: LastNorm, boundaries: Sequence[int], reference: Reference
) -> CaptureVerdict:
    """Name the columns of aux [T, A*H] and the last hidden state [T, H]; T may be less than the reference has."""
    hidden, tokens = reference.states.shape[-1], aux.shape[0]
    if tuple(aux.shape) != (tokens, len(boundaries) * hidden) or tuple(last.shape) != (tokens, hidden):
        raise EagleError(
            f"capture probe: states of shapes {list(aux.shape)} and {list(last.shape)}, but {len(boundaries)}"
            f" boundaries of hidden size {hidden} make [T, {len(boundaries) * hidden}] and [T, {hidden}]"
        )
    columns = [
        identify(column, Candidate(boundary, "stream"), reference)
        for column, boundary in zip(aux.split(hidden, dim=1), boundaries, strict=True)
    ]
    expected = Candidate(reference.num_blocks, "stream" if last_norm == "pre_norm" else "final_normed")
    return CaptureVerdict(
        tuple(boundaries), tuple(columns), identify(last, expected, reference), last_norm, tokens - LEFT_OUT
    )


def identify(column: Tensor, expected: Candidate, reference: Reference) -> Finding:
    """Name the column [T, H]. Raises EagleError for values that are not finite."""
    column = column.float()
    if not torch.isfinite(column).all():
        raise EagleError(f"capture probe: values that are not finite where {expected} should be")
    column = column[LEFT_OUT:]
    states = reference.states[:, LEFT_OUT : LEFT_OUT + len(column)]
    errors_CT = _relative_errors(column, states)
    errors = errors_CT.median(dim=1).values
    best = int(errors.argmin())
    apart = _relative_errors(states[best], states).median(dim=1).values > ALIKE
    runner_up = int(errors.masked_fill(~apart, float("inf")).argmin())
    alike = [c for c, is_apart in zip(reference.candidates, apart.tolist(), strict=True) if not is_apart]
    cosines = torch.nn.functional.cosine_similarity(column, states[best], dim=1)
    return Finding(
        expected=expected,
        nearest=reference.candidates[best] if errors[best] < FAR else None,
        alike=tuple(c for c in alike if c != reference.candidates[best]),
        error=float(errors[best]),
        cosine=float(cosines.median()),
        runner_up=reference.candidates[runner_up],
        runner_up_error=float(errors[runner_up]),
        share=float((errors_CT[best] < errors_CT[runner_up]).float().mean()),
    )


def _relative_errors(column: Tensor, states: Tensor) -> Tensor:
    """|c - r| / |c| for each candidate and token: [T, H], [C, T, H] -> [C, T]."""
    scale = column.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.stack([(column - state).norm(dim=1) / scale for state in states])
