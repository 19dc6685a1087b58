"""What SGLang counts while it speculates, as `SpecCounters`.

Of one request its `meta_info` says all. (Not by `spec_accept_length`, which is output tokens / verify steps: the first
token, which the prefill yields, is in it, and drafts accepted past the stop are not.) Of the server /metrics has the
verify steps alone, and its gauges of acceptance are of the last moments; so the server's totals are its own count of
verify steps, and what was accepted in those that were ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagle3x.engines.spec_metrics import by_histogram, samples
from eagle3x.types import EagleError, SpecCounters

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation

VERIFY_STEPS = "sglang:spec_verify_calls_total"
"""Of finished requests, counted before their last event is sent (managers/tokenizer_manager.py: collect_metrics)."""
HISTOGRAM, STEPS, CORRECT, PROPOSED = (
    "spec_correct_drafts_histogram", "spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts",
)  # fmt: skip
WHERE = "the response's meta_info"


def request_counters(meta: Mapping[str, Any], speculation: Speculation) -> SpecCounters:
    """Counters of one finished request, from its `meta_info`.

    `spec_correct_drafts_histogram[j]` is the number of verify steps that accepted exactly j drafts; it ends with the
    longest that was accepted. A request that ended with its first token has no such figures.

    Raises:
        EagleError: the figures are missing or contradict each other, or are those of another way to speculate.
    """
    k, histogram = speculation.num_speculative_tokens, [int(count) for count in meta.get(HISTOGRAM) or ()]
    if not histogram and meta["completion_tokens"] > 1:
        raise EagleError(f"{WHERE} lacks {HISTOGRAM}: the server does not speculate, or counts in another way")
    if len(histogram) > k + 1:
        raise EagleError(f"{WHERE}: {len(histogram) - 1} drafts were accepted in a step, at most {k} can be")
    counters = by_histogram([*histogram, *[0] * (k + 1 - len(histogram))], sum(histogram) * speculation.drafts, WHERE)
    expected = {STEPS: counters.verify_steps, CORRECT: counters.accepted, PROPOSED: counters.drafted}
    for name, value in expected.items():
        if (found := meta.get(name, value)) != value:
            raise EagleError(f"{WHERE}: {name} is {found}, by its histogram {histogram} it is {value}")
    return counters


def verify_steps(metrics: str) -> int:
    """Verify steps of all requests that the server has finished since it started, from the text of /metrics."""
    return int(sum(sample.value for sample in samples(metrics) if sample.name == VERIFY_STEPS))
