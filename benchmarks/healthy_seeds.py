"""How often a healthy drafter is said to be broken: one drafter a seed, on the same states, diagnosed by replay.

    python benchmarks/healthy_seeds.py [seeds=40] [prompts=16] [overrides]

Each is trained and exported by the pipeline (artifacts are kept, so that a run that was ended goes on), compared with
its export, climbs the two rungs that need no server, and is searched by the finder on the first `prompts` eval texts.
Prints a Markdown row a seed, and how many raised which alarm. `nearest` is the change of how it is fed or read that
gained most, and its p-value among all that were tried: an alarm needs 0.05.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle3x import composition, pipeline, targets
from eagle3x.artifacts import Store
from eagle3x.benchmark.statistics import Bootstrap
from eagle3x.config import Config
from eagle3x.data.records import read_responses
from eagle3x.diagnosis.captured_text import CapturedText, captured
from eagle3x.diagnosis.causes import Cause
from eagle3x.diagnosis.evidence import Evidence, causes, finder_causes
from eagle3x.diagnosis.finder import find
from eagle3x.diagnosis.found import Found
from eagle3x.diagnosis.hypotheses import boundaries_needed
from eagle3x.diagnosis.inputs import eval_text, load
from eagle3x.diagnosis.ladder import Rung, climb
from eagle3x.diagnosis.replay import replay
from eagle3x.drafters import checkpoint
from eagle3x.drafters.export import CHECKPOINT, read_export
from eagle3x.engines import adapter
from eagle3x.engines.config import LOGS, Job
from eagle3x.pipeline import StageRun
from eagle3x.targets import Target

NOT_SERVED = "this script serves nothing"


def diagnose(run: StageRun, texts: Sequence[CapturedText]) -> tuple[list[Cause], Found]:
    """As the diagnose stage without a server: what it calls wrong, and what the finder saw."""
    cfg, k = run.cfg, run.cfg.speculation.num_speculative_tokens
    bootstrap = Bootstrap(cfg.benchmark.resamples, cfg.benchmark.confidence, cfg.seed)
    export = read_export(run.inputs["export"].path)
    loaded = load(run, export)
    if export.trained is None or loaded.trained is None or loaded.served is None:
        raise SystemExit(f"{export.directory} is no drafter that was trained here: {loaded.unloadable}")
    fed = [text.fed(export.trained) for text in texts]
    rungs = [
        Rung("trained", "module as trained", tuple(replay(loaded.trained, fed, k))),
        Rung("exported", "served checkpoint", tuple(replay(loaded.served, fed, k))),
        *(Rung(name, "", None, NOT_SERVED) for name in ("responses", "states", "served")),
    ]
    ladder = climb(rungs, [text.text.id for text in texts], bootstrap)
    published = checkpoint.read(run.inputs["drafter"].path / CHECKPOINT)
    found = find(published, run.target, texts, export.trained, k, bootstrap)
    finder = finder_causes(found, ladder.first)
    return causes(Evidence(ladder, export.trained, None, loaded.changes, loaded.unloadable, finder=finder)), found


def states(cfg: Config, target: Target, responses: Path, prompts: int) -> list[CapturedText]:
    """The first eval texts, at every boundary that the finder may try."""
    k = cfg.speculation.num_speculative_tokens
    texts = [eval_text(response, k) for response in read_responses(responses, "eval")][:prompts]
    slot, job = cfg.extract_slot, Job(max(len(t.token_ids) for t in texts), Path(cfg.artifacts) / LOGS)
    needed = boundaries_needed(target.aux_layer_ids, target)
    with adapter(slot.backend.name).open(slot, target, cfg.hardware, job) as engine:
        return list(captured(engine, texts, needed))


def main(seeds: int, prompts: int, overrides: Sequence[str]) -> None:
    """One row a seed."""
    cell = composition.cells(overrides, multirun=False)[0]
    cfg, store = cell.config, Store(Path(cell.config.artifacts))
    target = targets.resolve(cfg.target)
    _, responses, _ = pipeline.run("hidden_states", cfg, cell.snapshot, target, store)
    texts = states(cfg, target, responses.path, prompts)
    tokens = sum(text.text.response_tokens for text in texts)
    print(f"{len(texts)} prompts, {tokens} tokens, {cfg.train.epochs} epochs\n", flush=True)
    print("| seed | tau | alarms | nearest | its gain | p | hypotheses | diagnosis, seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    alarms: Counter[str] = Counter()
    loud = 0
    for seed in range(1, seeds + 1):
        own = replace(cfg, seed=seed)
        snapshot = {**cell.snapshot, "seed": seed}
        inputs = {a.stage: a for a in pipeline.run("export", own, snapshot, target, store)}
        began = time.monotonic()
        named, found = diagnose(StageRun(own, Path(), inputs, target, {}), texts)
        seconds = time.monotonic() - began
        kinds = [cause.kind for cause in named] + [f"untold: {u.hypothesis.name}" for u in found.untold]
        alarms.update(kinds)
        loud += bool(kinds)
        best = found.tried[0]
        gain = "" if best.gain is None else f"{best.gain.value:+.3f} ({best.gain.low:+.3f} to {best.gain.high:+.3f})"
        p = "" if best.p_adjusted is None else f"{best.p_adjusted:.2f}"
        row = (f"{found.tau.value:.3f}", ", ".join(kinds) or "none", best.hypothesis.name, gain, p, found.hypotheses)
        print(f"| {seed} | {' | '.join(map(str, row))} | {seconds:.1f} |", flush=True)
    print(f"\n{loud} of {seeds} drafters raised an alarm" + "".join(f"; {kind}: {n}" for kind, n in alarms.items()))


if __name__ == "__main__":
    own = dict(a.split("=", 1) for a in sys.argv[1:] if a.startswith(("seeds=", "prompts=")))
    others = [a for a in sys.argv[1:] if not a.startswith(("seeds=", "prompts="))]
    main(int(own.get("seeds", 40)), int(own.get("prompts", 16)), others)
