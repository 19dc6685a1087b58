"""How far the states of other forms of a target are from its float32 reference, and what that costs a drafter.

    python benchmarks/drift.py DRAFTER RESPONSES NAME=DIRECTORY [NAME=DIRECTORY ...] [prompts=16] [target overrides]

DRAFTER: a checkpoint trained on target.aux_layer_ids. RESPONSES: a responses artifact of the same target, of whose eval
text the first prompts are taken. DIRECTORY: the target in another form (quantized, for example), streamed from disk.
`one block late` is the reference itself, a block off. Prints Markdown, and writes the heat map to drift.svg.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle3x import composition, targets
from eagle3x.benchmark.measure import spread
from eagle3x.benchmark.statistics import Bootstrap
from eagle3x.data.records import read_responses
from eagle3x.diagnosis.captured_text import CapturedText, Text, captured
from eagle3x.diagnosis.drift import Cost, Distance, Drift, cost, drift
from eagle3x.diagnosis.streamed_reference import StreamedTarget
from eagle3x.drafters.checkpoint import load
from eagle3x.reporting.heat_map import drift_figure
from eagle3x.reporting.words import figure


def main(arguments: Sequence[str]) -> None:
    """Compare, and print a row for each form and boundary."""
    drafter_path, responses_path, *rest = arguments
    forms = [a.partition("=")[::2] for a in rest if (Path(a.partition("=")[2]) / "config.json").is_file()]
    prompts = next((int(a.partition("=")[2]) for a in rest if a.startswith("prompts=")), 16)
    cfg = composition.cells([a for a in rest if a.startswith("target")], multirun=False)[0].config
    target = targets.resolve(cfg.target)
    boundaries, k = target.aux_layer_ids, cfg.speculation.num_speculative_tokens
    responses = read_responses(Path(responses_path), "eval")
    chosen = spread(responses, [r.category for r in responses], prompts)
    texts = [
        Text(r.id, r.token_ids[: r.prompt_tokens + r.response_tokens + k], r.prompt_tokens, r.response_tokens)
        for r in chosen
    ]
    drafter = load(Path(drafter_path), target).eval().requires_grad_(False)
    start = time.perf_counter()
    reference = list(captured(StreamedTarget(target), texts, range(target.num_blocks + 1)))
    print(f"{len(texts)} texts, {sum(len(t.token_ids) for t in texts)} tokens; all boundaries of the reference:"
          f" {time.perf_counter() - start:.0f} s\n")  # fmt: skip
    others = {
        name: list(captured(StreamedTarget(replace(target, path=Path(path))), texts, boundaries))
        for name, path in forms
    }
    others["one block late"] = [_late(one, boundaries) for one in reference]
    print("| states | boundary | nearest | error, median | 99 in 100 below | cosine | tau | difference |")
    print("|---|---|---|---|---|---|---|---|")
    drifts: dict[str, Drift] = {}
    for name, other in others.items():
        drifts[name] = drift(reference, other)
        _rows(name, drifts[name], cost(drafter, reference, other, drifts[name], boundaries, k, Bootstrap()))
    Path("drift.svg").write_text(drift_figure({name: found.as_dict() for name, found in drifts.items()}).svg)


def _late(one: CapturedText, boundaries: Sequence[int]) -> CapturedText:
    """What an engine captures that reads ids one block late."""
    sample = one.fed([b + 1 for b in boundaries])
    return replace(one, boundaries=tuple(boundaries), aux=sample.aux)


def _rows(name: str, found: Drift, costs: Cost) -> None:
    tau = f"{figure(costs.other)} | {figure(costs.difference, 3, signed=True)}"
    for b in found.boundaries:
        print(f"| {name} | {b.boundary} | {b.nearest} | {_figures(b.own)} | {tau} |")
        name, tau = "", " | "
    if found.last is not None:
        print(f"| | last | | {_figures(found.last)} | | |")
    if costs.offset is not None and costs.noise is not None:
        parts = f"offset {figure(costs.offset, 3, signed=True)}, noise {figure(costs.noise, 3, signed=True)}"
        print(f"| | | | | | | | of that {parts} |")


def _figures(distance: Distance) -> str:
    return f"{distance.error:.2g} | {distance.error_p99:.2g} | {distance.cosine:.5f}"


if __name__ == "__main__":
    main(sys.argv[1:])
