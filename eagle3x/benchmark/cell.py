"""The figures of a cell, derived from what its passes stored. They can be made again at any time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.benchmark.bootstrap import Bootstrap, Interval
from eagle3x.benchmark.degenerate import degenerate_from
from eagle3x.benchmark.metrics import acceptance, by_category, tau
from eagle3x.benchmark.outputs import compare_outputs
from eagle3x.benchmark.records import (
    Batch,
    RequestRecord,
    counters_of,
    parse_counters,
    read_batches,
    read_lines,
    requests,
)
from eagle3x.benchmark.statistics import (
    agreement,
    alpha_intervals,
    rate_interval,
    speedup_interval,
    survival_intervals,
    tau_interval,
)
from eagle3x.data.turns import conversations
from eagle3x.diagnosis.serve_probe import serve_verdict
from eagle3x.quantization.stored import ROUNDED_INPUTS
from eagle3x.types import SpecCounters, total

if TYPE_CHECKING:
    from eagle3x.config import Config

ACCEPTANCE = "acceptance.jsonl"
BASELINE = "baseline.jsonl"
TIMING = "timing.jsonl"
REPLAY = "replay.jsonl"
CONTEXT = "context.json"
CELL = "cell.json"
SCHEMA_VERSION = 2
NEAR_TIE = {"float32": 1e-4, "float16": 0.0625, "bfloat16": 0.5}
"""Top-2 logit gaps that rounding can turn over: four steps of the dtype at logits of 16 to 32 for the 16-bit ones."""
ROUNDED_NEAR_TIE = 0.1
"""The same where a layer's inputs are rounded to 8 bits: one that lies between two codes moved gaps by 0.06 (INT8)."""
PREDICTED = "b"
"""The candidate that is predicted to be fed; the others are what replay would see if the layers were wrong."""


def sampled_file(temperature: float) -> str:
    """Where the acceptance pass at a temperature above 0 is stored."""
    return f"acceptance_t{temperature!r}.jsonl"


def summarise(directory: Path, cfg: Config) -> dict[str, Any]:
    """The content of cell.json (docs/metrics.md) from the counters in `directory`.

    Of `cfg` it reads how figures are made, not what was measured: benchmark.{resamples, confidence, near_tie}, seed.
    """
    context = json.loads((directory / CONTEXT).read_text(encoding="utf-8"))
    bootstrap = Bootstrap(cfg.benchmark.resamples, cfg.benchmark.confidence, cfg.seed)
    served = requests(read_batches(directory / ACCEPTANCE))
    counters = [counters_of(r) for r in served]
    categories = [r.category for r in served]
    ids = [r.id for r in served]
    clusters = conversations(ids)  # of all, so that a conversation stays one where a part of its turns is left out
    figures = acceptance(counters)
    tails = [_tail(r) for r in served]
    rows = range(len(served))
    sound = [i for i in rows if tails[i] is None and counters[i].verify_steps]
    groups = {name: [i for i in rows if categories[i] == name] for name in by_category(counters, categories)}
    replayed = _read_replay(directory, served, context)
    return {
        "schema_version": SCHEMA_VERSION,
        "requests": len(served),
        "output_tokens": sum(len(r.completion.token_ids) for r in served),
        "num_speculative_tokens": context["num_speculative_tokens"],
        "topk": context["topk"],
        "drafts": context["drafts"],
        "engine": context["engine"],
        "tau": asdict(tau_interval(counters, ids, bootstrap)),
        "tau_without_degenerate": asdict(_tau(counters, clusters, sound, bootstrap)) if sound else None,
        "degenerate_requests": sum(t is not None for t in tails),
        "degenerate_tails": {ids[i]: tails[i] for i in rows if tails[i] is not None},
        "macro": figures.tau_macro,
        "sampled": [_sampled(directory, pass_, bootstrap) for pass_ in context["sampled"]],
        "survival": [asdict(s) for s in survival_intervals(counters, ids, bootstrap)],
        "alpha": [None if a is None else asdict(a) for a in alpha_intervals(counters, ids, bootstrap)],
        "slot_use": figures.slot_use,
        "draft_efficiency": figures.draft_efficiency,
        "per_category": {name: asdict(_tau(counters, clusters, part, bootstrap)) for name, part in groups.items()},
        "speedup": _speedup(read_batches(directory / TIMING), bootstrap),
        "identical_outputs": _outputs(requests(read_batches(directory / BASELINE)), served, context, cfg),
        "replay": None if replayed is None else _replay(served, replayed, context, bootstrap),
        "boundaries": {
            "trained": context["trained"],
            "predicted": context["predicted"],
            "num_blocks": context["num_blocks"],
            "serve_probe": _serve_probe(counters, ids, replayed, context, bootstrap),
        },
        "mismatched": context["mismatched"],
    }


def _sampled(directory: Path, pass_: Mapping[str, float], bootstrap: Bootstrap) -> dict[str, Any]:
    """Acceptance of sampled text. No replay stands beside it: what a last step drew past the end is not known."""
    served = requests(read_batches(directory / sampled_file(pass_["temperature"])))
    counters, ids = [counters_of(r) for r in served], [r.id for r in served]
    return {
        **pass_,
        "requests": len(served),
        "output_tokens": sum(len(r.completion.token_ids) for r in served),
        "tau": asdict(tau_interval(counters, ids, bootstrap)),
        "survival": [asdict(s) for s in survival_intervals(counters, ids, bootstrap)],
    }


def _outputs(
    plain: Sequence[RequestRecord], served: Sequence[RequestRecord], context: Mapping[str, Any], cfg: Config
) -> dict[str, Any] | None:
    """Outputs with and without the drafter; None where the target was not served without it."""
    if not plain:
        return None
    near_tie = _near_tie(context["engine"]) if cfg.benchmark.near_tie is None else cfg.benchmark.near_tie
    outputs = compare_outputs([r.completion for r in plain], [r.completion for r in served], near_tie)
    return {
        "requests": outputs.requests,
        "rate": outputs.rate,
        "lossy": len(outputs.lossy),
        "differences": [asdict(d) for d in outputs.differences],
    }


def _near_tie(engine: Mapping[str, Any]) -> float:
    own = NEAR_TIE[engine["dtype"]]
    return max(own, ROUNDED_NEAR_TIE) if engine["quantization"] in ROUNDED_INPUTS else own


def _tail(record: RequestRecord) -> int | None:
    """Where the output starts to loop. Its stop token belongs to no loop."""
    tokens = record.completion.token_ids
    return degenerate_from(tokens[:-1] if record.completion.finish == "stop" else tokens)


def _tau(
    counters: Sequence[SpecCounters], clusters: Sequence[str], rows: Sequence[int], bootstrap: Bootstrap
) -> Interval:
    """Interval of some requests' tau. One prompt says nothing of others: then it is all that is possible, 1 to k+1."""
    part = [counters[i] for i in rows]
    if len({clusters[i] for i in rows}) < 2:
        return Interval(tau(total(part)), 1.0, 1.0 + len(part[0].accepted_at))
    return tau_interval(part, [clusters[i] for i in rows], bootstrap)


def _speedup(batches: Sequence[Batch], bootstrap: Bootstrap) -> dict[str, Any] | None:
    """By concurrency: ratio of summed times, clustered by prompt; rates; tau from the engine's totals."""
    found = {}
    for concurrency in sorted({b.concurrency for b in batches}):
        legs = [b for b in batches if b.concurrency == concurrency]
        with_drafter, without = ([b for b in legs if b.drafter is side] for side in (True, False))
        ids = [r.id for r in without[0].requests]
        totals = [b.totals for b in with_drafter if b.totals is not None]
        found[str(concurrency)] = {
            **{
                name: asdict(
                    speedup_interval(_summed(without, ids, field), _summed(with_drafter, ids, field), ids, bootstrap)
                )
                for name, field in (("decode", "decode_seconds"), ("end_to_end", "end_to_end_seconds"))
            },
            "rates": {"baseline": _rates(without, bootstrap), "drafter": _rates(with_drafter, bootstrap)},
            "tau": tau(total(totals)) if totals else None,
            "prompts": len(ids),
        }
    return found or None


def _summed(legs: Sequence[Batch], ids: Sequence[str], field: str) -> list[float]:
    """Seconds of each request over all legs of a side."""
    sums = dict.fromkeys(ids, 0.0)
    for record in requests(legs):
        sums[record.id] += getattr(record, field)
    return list(sums.values())


def _rates(legs: Sequence[Batch], bootstrap: Bootstrap) -> dict[str, Any]:
    """Tokens per second: of one request while it decodes, and of the engine from the first request to the last.

    The engine's time belongs to no request alone: each has the share of it that it has of all requests' own times.
    """
    records = requests(legs)
    ids = [r.id for r in records]
    tokens = [len(r.completion.token_ids) for r in records]
    own = [r.end_to_end_seconds for r in records]
    share = sum(b.wall_seconds for b in legs) / sum(own)
    decoded, decoding = [n - 1 for n in tokens], [r.decode_seconds for r in records]
    return {
        "decode_per_request": asdict(rate_interval(decoded, decoding, ids, bootstrap)),
        "end_to_end": asdict(rate_interval(tokens, [share * s for s in own], ids, bootstrap)),
    }


@dataclass(frozen=True)
class _Replayed:
    """What replay predicts for the served requests, in their order: counters by candidate, each walk's smallest gap."""

    counters: dict[str, list[SpecCounters]]
    draft_gaps: list[float | None]


def _read_replay(directory: Path, served: Sequence[RequestRecord], context: Mapping[str, Any]) -> _Replayed | None:
    """None for a tree, which has no candidates."""
    if not context["candidates"]:
        return None
    lines = {line["id"]: line for line in read_lines(directory / REPLAY)}
    ordered = [lines[r.id] for r in served]
    by_name = {PREDICTED: [parse_counters(line) for line in ordered]}
    for name in context["candidates"]:
        if name != PREDICTED:
            by_name[name] = [parse_counters(line["others"][name]) for line in ordered]
    return _Replayed(by_name, [line["draft_gap"] for line in ordered])


def _replay(
    served: Sequence[RequestRecord], replayed: _Replayed, context: Mapping[str, Any], bootstrap: Bootstrap
) -> dict[str, Any]:
    """What replay predicted for each request, against what the engine counted."""
    ids = [r.id for r in served]
    counters = [counters_of(r) for r in served]
    predicted = replayed.counters[PREDICTED]
    others = {name: c for name, c in replayed.counters.items() if name != PREDICTED}
    found = agreement(counters, predicted, ids, context["exact"], bootstrap)
    differences = [
        {
            "id": ids[i],
            "served": _walked(counters[i]),
            "replayed": _walked(predicted[i]),
            "draft_gap": replayed.draft_gaps[i],
            "target_gap": min(served[i].completion.top2_gaps or (), default=None),
        }
        for i in found.differing
    ]
    return {
        "requests": found.requests,
        "identical_counters": found.identical,
        "differences": differences,
        "tau": asdict(tau_interval(predicted, ids, bootstrap)),
        "survival": list(acceptance(predicted).survival),
        "paired_diff": asdict(found.paired_diff),
        "verdict": found.verdict,
        "sentence": found.sentence,
        "prompts_needed": found.prompts_needed,
        "candidates": {
            name: {"boundaries": context["candidates"][name], **asdict(tau_interval(c, ids, bootstrap))}
            for name, c in others.items()
        },
    }


def _serve_probe(
    counters: Sequence[SpecCounters],
    ids: Sequence[str],
    replayed: _Replayed | None,
    context: Mapping[str, Any],
    bootstrap: Bootstrap,
) -> dict[str, Any] | None:
    """Which boundaries the engine feeds, judged by all requests; None if replay had one candidate alone, or none."""
    if replayed is None:
        return None
    by_boundaries = {tuple(context["candidates"][name]): c for name, c in replayed.counters.items()}
    if len(by_boundaries) < 2:
        return None
    predicted, exact = tuple(context["predicted"]), context["exact"]
    return serve_verdict(counters, by_boundaries, predicted, ids, exact, bootstrap).as_dict()


def _walked(counters: SpecCounters) -> list[int]:
    """[V, A_1, .., A_k]."""
    return [counters.verify_steps, *counters.accepted_at]
