"""How much faster is an exact replay than running the speculation that it replays?

    python benchmarks/replay.py EXPORT RESPONSES [prompts=64] [tokens=128] [k=5] [rounds=2] [overrides]

EXPORT, RESPONSES: artifacts of a run on the same target. The target first writes `tokens` tokens after each train
prompt; then, in turns, the transformers engine speculates along them (all prompts at once), and the texts are captured
and replayed. Both must count the same in every request. "States at hand": the replay alone, as where a rung shares its
states with the one above it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from eagle3x import composition, targets
from eagle3x.benchmark.config import Speculation
from eagle3x.benchmark.measure import reference_slot
from eagle3x.data.records import read_responses
from eagle3x.diagnosis.captured_text import CapturedText, Text, captured
from eagle3x.diagnosis.replay import replay
from eagle3x.drafters.checkpoint import load
from eagle3x.drafters.export import read_export
from eagle3x.engines import adapter
from eagle3x.engines.base import Engine
from eagle3x.engines.config import Job
from eagle3x.types import Request, Response, SpecCounters

T = TypeVar("T")


def written(engine: Engine, responses: Sequence[Response], tokens: int, k: int) -> list[Text]:
    """What the target writes after each prompt, and k tokens more, which the last drafts reach."""
    asked = [Request(r.id, r.token_ids[: r.prompt_tokens], tokens + k, ignore_eos=True) for r in responses]
    prompts = {request.id: request.prompt_ids for request in asked}
    return [Text(c.id, (*prompts[c.id], *c.token_ids), len(prompts[c.id]), tokens) for c in engine.generate(asked)]


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what it gave."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def main(export_dir: Path, responses: Path, settings: dict[str, int], overrides: list[str]) -> None:
    """One table: seconds of each turn, ratio first."""
    prompts, tokens, k, rounds = (settings[name] for name in ("prompts", "tokens", "k", "rounds"))
    cfg = composition.cells(overrides, multirun=False)[0].config
    target, export = targets.resolve(cfg.target), read_export(export_dir)
    assert export.trained is not None, "an export of a drafter that was trained here"
    boundaries = export.trained
    chosen = read_responses(responses, "train")[:prompts]
    job = Job(max(r.prompt_tokens for r in chosen) + tokens + 2 * (k + 1), Path("logs"))
    with adapter("transformers").open(reference_slot(cfg.extract_slot, target), target, cfg.hardware, job) as engine:
        texts = written(engine, chosen, tokens, k)
        requests = [Request(t.id, t.token_ids[: t.prompt_tokens], tokens, ignore_eos=True) for t in texts]
        drafter = load(export.directory, target).eval().requires_grad_(False)
        served = engine.serve(export.directory, Speculation.chain(k))

        def speculated() -> dict[str, SpecCounters | None]:
            return {c.id: c.counters for c in served.complete(requests, len(requests))}

        def states() -> list[CapturedText]:
            return list(captured(engine, texts, boundaries))

        def replayed(captures: Sequence[CapturedText]) -> dict[str, SpecCounters]:
            counters = replay(drafter, (c.fed(boundaries) for c in captures), k)
            return {c.text.id: found for c, found in zip(captures, counters, strict=True)}

        print(f"{len(texts)} prompts, {tokens} tokens each, k = {k}, {cfg.hardware}", flush=True)
        print(
            "| speculation / replay | speculation / replay, states at hand | speculation | capture | replay | equal |"
        )
        print("| --- | --- | --- | --- | --- | --- |")
        ratios = []
        for _ in range(rounds):
            speculation, counted = timed(speculated)
            capture, captures = timed(states)
            alone, found = timed(lambda captures=captures: replayed(captures))
            ratios.append(speculation / (capture + alone))
            equal = sum(counted[name] == found[name] for name in found)
            print(
                f"| {ratios[-1]:.1f} | {speculation / alone:.1f} | {speculation:.1f} s | {capture:.1f} s |"
                f" {alone:.1f} s | {equal} of {len(found)} |",
                flush=True,
            )
        print(f"\nmedian: {statistics.median(ratios):.1f}")


if __name__ == "__main__":
    defaults = {"prompts": 64, "tokens": 128, "k": 5, "rounds": 2}
    given = dict(a.split("=", 1) for a in sys.argv[3:] if a.split("=", 1)[0] in defaults)
    others = [a for a in sys.argv[3:] if a.split("=", 1)[0] not in defaults]
    main(Path(sys.argv[1]), Path(sys.argv[2]), defaults | {n: int(v) for n, v in given.items()}, others)
