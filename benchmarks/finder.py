"""What the finder names when a fault is planted in a good drafter, how much of tau comes back, and how long it takes.

    python benchmarks/finder.py DRAFTER RESPONSES [prompts=48] [only=columns_swapped,...] [target overrides]

DRAFTER: a checkpoint that was trained on target.aux_layer_ids. RESPONSES: a responses artifact of the same target,
whose eval text is captured by the reference. Prints Markdown; `expected` is what must be named for it to be right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3x import composition, targets
from eagle3x.benchmark.measure import reference_slot, spread
from eagle3x.benchmark.statistics import Bootstrap
from eagle3x.data.records import read_responses
from eagle3x.diagnosis.attention_weights import KEY, QUERY, VALUE, other_inputs, to_halves
from eagle3x.diagnosis.captured_text import Text, captured
from eagle3x.diagnosis.evidence import finder_causes
from eagle3x.diagnosis.finder import find
from eagle3x.diagnosis.hypotheses import FC, boundaries_needed
from eagle3x.drafters.checkpoint import EMBEDDING, HEAD, Published, read
from eagle3x.engines import adapter
from eagle3x.engines.config import Job

HEAD_DIM = 64
"""Of the default drafter."""


@dataclass(frozen=True)
class Fault:
    """A good drafter made wrong. off: how far the config's boundaries are from the right ones; None: it names none."""

    expected: tuple[str, ...]
    tensors: Callable[[dict[str, Tensor]], None] = lambda _: None
    arch: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    off: tuple[int, ...] | None = (0, 0, 0)


def swap_columns(tensors: dict[str, Tensor]) -> None:
    """The first two of three."""
    tensors[FC] = tensors[FC].unflatten(1, (3, -1))[:, [1, 0, 2]].flatten(1)


def swap_inputs(tensors: dict[str, Tensor]) -> None:
    """For attention that reads the hidden state first."""
    tensors |= {name: other_inputs(tensors[name]) for name in (QUERY, KEY, VALUE)}


def permute_pairs(tensors: dict[str, Tensor]) -> None:
    """Through the Llama conversion once more."""
    tensors |= {name: to_halves(tensors[name], HEAD_DIM) for name in (QUERY, KEY)}


def other_embedding(tensors: dict[str, Tensor]) -> None:
    """As it was initialised."""
    vocab = len(tensors["t2d"])
    tensors[EMBEDDING] = torch.randn(vocab, tensors[HEAD].shape[1], generator=generator()) * 0.02


def shift_rows(tensors: dict[str, Tensor]) -> None:
    """d2t one row on."""
    size = len(tensors["d2t"])
    ids = (torch.arange(size) + tensors["d2t"]).roll(1)
    tensors["d2t"] = ids - torch.arange(size)
    del tensors["t2d"]


def other_vocabulary(tensors: dict[str, Tensor]) -> None:
    """d2t and t2d of other tokens."""
    size, vocab = len(tensors["d2t"]), len(tensors["t2d"])
    ids = torch.randperm(vocab, generator=generator())[:size].sort().values
    tensors["d2t"] = ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)


def drop(*names: str) -> Callable[[dict[str, Tensor]], None]:
    """Without these tensors."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def both(*changes: Callable[[dict[str, Tensor]], None]) -> Callable[[dict[str, Tensor]], None]:
    """One after the other."""

    def change_all(tensors: dict[str, Tensor]) -> None:
        for change in changes:
            change(tensors)

    return change_all


def other_drafter(tensors: dict[str, Tensor]) -> None:
    """All weights drawn anew."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            tensors[name] = torch.randn(tensor.shape, generator=generator()) * 0.02


def flipped(flag: str) -> Callable[[Any], Mapping[str, Any]]:
    """The config says the other."""
    return lambda arch: {flag: not getattr(arch, flag)}


def generator() -> torch.Generator:
    """Always the same draws."""
    return torch.Generator().manual_seed(0)


FAULTS = {
    "healthy": Fault(()),
    "ids one early": Fault(("offset_training",), off=(-1, -1, -1)),
    "ids one late": Fault(("offset_training",), off=(1, 1, 1)),
    "ids two late": Fault(("offset_training",), off=(2, 2, 2)),
    "third id one late": Fault(("offset_training",), off=(0, 0, 1)),
    "first id two late": Fault(("offset_training",), off=(2, 0, 0)),
    "no ids": Fault((), off=None),
    "columns swapped": Fault(("columns_swapped",), swap_columns),
    "attention's inputs swapped": Fault(("inputs_swapped",), swap_inputs),
    "rotary pairs permuted": Fault(("rotary_layout",), permute_pairs),
    "norm_before_residual": Fault(("norm_variant",), arch=flipped("norm_before_residual")),
    "norm_output": Fault(("norm_variant",), arch=flipped("norm_output")),
    "random embedding": Fault(("random_embedding",), other_embedding),
    "d2t one row on": Fault(("d2t_shifted",), shift_rows),
    "no d2t": Fault(("d2t_missing",), drop("d2t")),
    "no d2t; no t2d": Fault(("d2t_missing",), drop("d2t", "t2d")),
    "d2t of other tokens": Fault(("stale_vocabulary",), other_vocabulary),
    "rope_theta 10000": Fault(("rope_base",), arch=lambda _: {"rope_theta": 10_000.0}),
    "rope_theta 100": Fault(("rope_base",), arch=lambda _: {"rope_theta": 100.0}),
    "columns and d2t": Fault(("columns_swapped", "d2t_shifted"), both(swap_columns, shift_rows)),
    "norm and ids": Fault(("norm_variant", "offset_training"), arch=flipped("norm_before_residual"), off=(2, 2, 2)),
    "norm; columns and d2t": Fault(
        ("columns_swapped", "d2t_shifted", "norm_variant"), both(swap_columns, shift_rows),
        flipped("norm_before_residual"),
    ),
    "another drafter": Fault(("other_target",), both(other_drafter, other_embedding)),
}  # fmt: skip


def planted(good: Published, fault: Fault) -> Published:
    """The drafter with the fault."""
    tensors = dict(good.tensors)
    fault.tensors(tensors)
    return replace(good, tensors=tensors, arch=replace(good.arch, **fault.arch(good.arch)))


def main(drafter: Path, responses: Path, prompts: int, only: list[str], overrides: list[str]) -> None:
    """One row a fault."""
    cfg = composition.cells(overrides, multirun=False)[0].config
    target, good = targets.resolve(cfg.target), read(drafter)
    eval_texts = read_responses(responses, "eval")
    chosen = spread(eval_texts, [r.category for r in eval_texts], prompts)
    texts = [Text(r.id, r.token_ids, r.prompt_tokens, r.response_tokens) for r in chosen]
    right = target.aux_layer_ids
    late = tuple(b + 2 for b in right)
    boundaries = sorted({*boundaries_needed(right, target), *boundaries_needed(late, target)})
    job = Job(longest=max(len(t.token_ids) for t in texts), logs=Path("logs"))
    with adapter("transformers").open(reference_slot(cfg.extract_slot, target), target, cfg.hardware, job) as engine:
        states = list(captured(engine, texts, boundaries))
    bootstrap = Bootstrap(cfg.benchmark.resamples, cfg.benchmark.confidence, cfg.seed)
    k = cfg.speculation.num_speculative_tokens
    print(f"{len(texts)} prompts, {sum(t.response_tokens for t in texts)} tokens, k={k}", flush=True)
    print("| planted | named | right | tau | repaired | gain | p | hypotheses | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, fault in FAULTS.items():
        if only and name not in only:
            continue
        began = time.monotonic()
        claimed = None if fault.off is None else tuple(b + d for b, d in zip(right, fault.off, strict=True))
        found = find(planted(good, fault), target, states, claimed, k, bootstrap)
        seconds = time.monotonic() - began
        kinds = tuple(sorted(cause.kind for cause in finder_causes(found)))
        gains = "; ".join(f"{n.gain.value:+.3f} ({n.gain.low:+.3f} to {n.gain.high:+.3f})" for n in found.named)
        p = "; ".join(f"{n.p_adjusted:.3f}" for n in found.named)
        verdict = "yes" if kinds == fault.expected else "no"
        named = "; ".join(n.hypothesis.name for n in found.named) or ", ".join(kinds) or f"({found.boundaries})"
        best = found.tried[0]
        if not found.named and best.gain is not None:
            gains = f"best: {best.hypothesis.name} {best.gain.value:+.3f}"
        print(f"| {name} | {named} | {verdict} | {found.tau.value:.3f} | {found.tau_named.value:.3f} | {gains} | {p} |"
              f" {found.hypotheses} | {seconds:.1f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    arguments = dict(a.split("=", 1) for a in sys.argv[3:] if a.startswith(("prompts=", "only=")))
    others = [a for a in sys.argv[3:] if not a.startswith(("prompts=", "only="))]
    wanted = arguments["only"].split(",") if "only" in arguments else []
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(arguments.get("prompts", 48)), wanted, others)
