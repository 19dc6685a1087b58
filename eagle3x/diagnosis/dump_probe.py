"""What a dump's columns are: samples of it compared with the float32 reference, by the same measure as a capture.

Shapes: T tokens, H hidden, A columns beside the last hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3x.data.dumps import Dump, DumpSample
from eagle3x.diagnosis.probe import LEAST_TOKENS, LEFT_OUT, SURE, Finding, identify
from eagle3x.diagnosis.reference import Candidate, Reference, references
from eagle3x.targets import Target
from eagle3x.types import EagleError, LastNorm

UNKNOWN = Candidate(0, "stream")
"""Nothing is expected of a dump: a finding's own verdict means nothing here."""


@dataclass(frozen=True)
class Column:
    """A column of the dump: its name there, its dtype, and what it is in each sample that was probed."""

    name: str
    dtype: str
    findings: tuple[Finding, ...]

    @property
    def found(self) -> Candidate | None:
        """What it is in every sample; None if nothing is near, a sample cannot tell, or samples differ."""
        nearest = {_meant(finding) for finding in self.findings}
        certain = all(f.share >= SURE for f in self.findings)
        return next(iter(nearest)) if certain and len(nearest) == 1 else None

    def __str__(self) -> str:
        worst = max(self.findings, key=lambda f: f.error)
        figures = f"relative error {worst.error:.2g}, next {worst.runner_up_error:.2g}: {worst.runner_up}"
        names = sorted({str(f.nearest) if f.nearest else "nothing known" for f in self.findings})
        if self.found is not None:
            text = str(self.found)
        elif names == ["nothing known"]:
            text = "NOTHING KNOWN is near"
        elif len(names) > 1:
            text = f"NOT THE SAME in each sample: {', '.join(names)}"
        else:
            text = f"CANNOT TELL {names[0]} from {worst.runner_up}"
        return f"{self.name} ({self.dtype}): {text} ({figures})"


@dataclass(frozen=True)
class DumpVerdict:
    """What the probe found in a dump: its columns in their order, and the last hidden state."""

    format: str
    columns: tuple[Column, ...]
    last: Column
    samples: int
    num_blocks: int

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """In column order; None if a column is no boundary's stream."""
        found = [column.found for column in self.columns]
        streams = [c.boundary for c in found if c is not None and c.kind == "stream"]
        return tuple(streams) if len(streams) == len(found) else None

    @property
    def last_norm(self) -> LastNorm | None:
        """On which side of the final norm the last hidden state is; None if it is something else."""
        if self.last.found == Candidate(self.num_blocks, "final_normed"):
            return "post_norm"
        return "pre_norm" if self.last.found == Candidate(self.num_blocks, "stream") else None

    @property
    def usable(self) -> bool:
        """Whether a drafter can be trained on it: different boundaries, in any order, and a last hidden state."""
        found = self.boundaries
        return found is not None and len(set(found)) == len(found) and self.last_norm is not None

    def describe(self) -> str:
        """A headline, a line for each column, and what to do with it."""
        found = list(self.boundaries or ())
        if self.usable:
            head = f"boundaries {found} and the {self.last_norm} last hidden state"
            ordered = sorted(found)
            say = f"'target.aux_layer_ids={ordered}' capture=as_is".replace(", ", ",")
            moved = "" if ordered == found else f" Columns are not ascending: they are put in the order {ordered}."
            use = f"To train on it: hidden_states.from=<this directory> {say}.{moved}"
        else:
            head = "NOT what a drafter can be trained on"
            use = "Each column must be a boundary (each another one), and the last one the target's last hidden state."
        lines = [str(column) for column in (*self.columns, self.last)]
        return "\n  ".join([f"dump probe ({self.format}, {self.samples} samples): {head}", *lines, use])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": self.format,
            "boundaries": None if self.boundaries is None else list(self.boundaries),
            "last_norm": self.last_norm,
            "samples": self.samples,
            "columns": [str(column) for column in (*self.columns, self.last)],
        }


def probe_dump(dump: Dump, target: Target, samples: int, probe_tokens: int) -> DumpVerdict:
    """Name the columns from `samples` samples spread over the dump, of each its first `probe_tokens` tokens.

    A beginning has the same states as the whole, since every target here is causal. Raises EagleError for a dump
    without samples that are long enough, or whose token ids are not the target's.
    """
    chosen = list(_spread(dump, samples))
    texts = [_text(sample, target, probe_tokens) for sample in chosen]
    probed = [_probed(sample, reference) for sample, reference in zip(chosen, references(target, texts), strict=True)]
    names = [f"column {i}" for i in range(len(probed[0]) - 1)] + ["last"]
    if any(len(findings) != len(names) for findings in probed):
        raise EagleError(f"{dump.directory}: samples have different numbers of columns")
    dtype = str(chosen[0].last.dtype).removeprefix("torch.")
    *columns, last = (Column(name, dtype, tuple(findings[i] for findings in probed)) for i, name in enumerate(names))
    return DumpVerdict(dump.format, tuple(columns), last, len(probed), target.num_blocks)


def _spread(dump: Dump, samples: int) -> Sequence[DumpSample]:
    """Evenly spread samples that are long enough for the probe."""
    least, found = LEFT_OUT + LEAST_TOKENS, []
    for share in range(samples):
        start = share * len(dump) // samples
        for index in range(start, (share + 1) * len(dump) // samples):
            sample = dump[index]
            if len(sample.token_ids) >= least:
                found.append(sample)
                break
    if not found:
        raise EagleError(f"{dump.directory}: no sample has the {least} tokens that the probe needs")
    return found


def _text(sample: DumpSample, target: Target, probe_tokens: int) -> list[int]:
    tokens = sample.token_ids[:probe_tokens].tolist()
    if min(tokens) < 0 or max(tokens) >= target.vocab_size:
        raise EagleError(
            f"{sample.id}: token ids up to {max(tokens)}, but {target.name} has {target.vocab_size}: other target"
        )
    if sample.last.shape[-1] != target.hidden_size:
        raise EagleError(
            f"{sample.id}: states are {sample.last.shape[-1]} wide, but {target.name}'s are {target.hidden_size}"
        )
    return tokens


def _probed(sample: DumpSample, reference: Reference) -> list[Finding]:
    tokens, hidden = reference.states.shape[1:]
    columns = [column[:tokens] for column in (*sample.aux.split(hidden, dim=1), sample.last)]
    for number, column in enumerate(columns):
        if not torch.isfinite(column.float()).all():
            raise EagleError(f"{sample.id}: column {number} has values that are not finite in {sample.last.dtype}")
    return [identify(column, UNKNOWN, reference) for column in columns]


def _meant(finding: Finding) -> Candidate | None:
    """The nearest candidate; of those that are the same vectors on this target, a boundary's stream."""
    if finding.nearest is None:
        return None
    return next((c for c in (finding.nearest, *finding.alike) if c.kind == "stream"), finding.nearest)
