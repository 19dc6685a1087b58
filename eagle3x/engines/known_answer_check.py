"""The serve probe's first half: the tagged known-answer pair, once for each engine build and way of serving.

The counters of a real drafter can tell one set of boundaries from another only by chance; this pair's say it exactly:
k + 1 tokens a step if the engine feeds each slot its own boundary, one if it does not (diagnosis/known_answer.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from eagle3x.benchmark.config import Speculation
from eagle3x.config import TargetConfig
from eagle3x.fingerprint import cache_dir
from eagle3x.identity import digest
from eagle3x.progress import log
from eagle3x.targets import resolve
from eagle3x.types import EagleError, Request, SpecCounters, total

if TYPE_CHECKING:
    from eagle3x.engines.base import Endpoint
    from eagle3x.targets import Target

TOKENS = 40
STARTS = (3, 10, 27, 44)
"""Last tokens of the prompts: where the walk along the target's permutation starts."""
SETTLE_SECONDS = 10.0
"""Engines record what they accepted a moment after they have answered."""
POLL_SECONDS = 0.05
LONGEST = 256
"""Tokens that a server for the pair must take."""

Serve = Callable[["Target", Path, "Speculation"], AbstractContextManager["Endpoint"]]
"""Serves a target with the drafter in a directory, in every other way as the real one will be served."""


def check_known_answer(identity: Mapping[str, Any], speculation: Speculation, serve: Serve) -> None:
    """Serve the pair, unless the engine with this `identity` has passed before.

    With a chain, whatever the real drafter is served with: where a slot is wrong the best draft is, but the second best
    may be right, and a tree has it too. The layers that are captured are the same.

    Raises:
        EagleError: the engine feeds its drafter something else than the boundaries that the drafter's config names.
    """
    k = speculation.num_speculative_tokens
    folder = cache_dir() / "known-answer"
    passed = folder / f"{digest({**identity, 'k': k})}.json"
    if passed.is_file():
        log(f"known-answer pair: {identity['engine']} {identity['version']} passed before")
        return
    from eagle3x.diagnosis.known_answer import build

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"pair-{k}.lock"):
        known = build(folder / f"pair-{k}", k)
    target = resolve(
        TargetConfig(
            name="known-answer", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
            trust_remote_code=False, aux_layer_ids=known.boundaries,
        )
    )  # fmt: skip
    requests = [Request(f"known-{start}", (17, 40, 9, start), TOKENS, ignore_eos=True) for start in STARTS]
    with serve(target, known.drafter_dir, Speculation.chain(k)) as endpoint:
        before = endpoint.totals()
        if before is None:
            raise EagleError(f"known-answer pair: {identity['engine']} has no counters although it has a drafter")
        texts = {c.id: c.token_ids for c in endpoint.complete(requests, 1)}
        expected = total([known.counters(r.prompt_ids, TOKENS, ignore_eos=True) for r in requests])
        moved = _settled(endpoint, before, expected)
    if wrong := [r.id for r in requests if texts[r.id] != known.output(r.prompt_ids, TOKENS, ignore_eos=True)]:
        raise EagleError(f"known-answer pair: {identity['engine']} wrote other text than its target computes: {wrong}")
    tau = 1 + moved.accepted / max(moved.verify_steps, 1)
    if moved != expected:
        raise EagleError(
            f"known-answer pair: tau is {tau:.2f} where {k + 1} is certain, so {identity['engine']}"
            f" {identity['version']} does not feed a drafter the boundaries that its config names, or does not count"
            " what it accepts; nothing that it measures with a drafter would mean anything"
        )
    passed.write_text(json.dumps({"identity": dict(identity), "tau": tau}, indent=1) + "\n", encoding="utf-8")
    log(f"known-answer pair: tau {tau:.2f}, as it must be ({identity['engine']} {identity['version']})")


def _settled(endpoint: Endpoint, before: SpecCounters, expected: SpecCounters) -> SpecCounters:
    """What the totals moved by, once that is what is expected, or no more time is left."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        after = endpoint.totals()
        moved = None if after is None else after - before
        if moved == expected or time.monotonic() > deadline:
            return moved or SpecCounters.zero(len(expected.accepted_at))
        time.sleep(POLL_SECONDS)
