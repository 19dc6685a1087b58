"""What vLLM counts while it speculates, as `SpecCounters`: the server's totals in the Prometheus text of /metrics, and
the figures of one request in its response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from eagle3x.types import EagleError, SpecCounters

VERIFY_STEPS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
CACHE = "vllm:cache_config_info"

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(?P<name>[a-zA-Z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Sample:
    """One line of Prometheus' text format."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The samples of Prometheus' text format, in order.

    Raises:
        EagleError: a line that is neither a sample nor a comment.
    """
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        parsed = _SAMPLE.fullmatch(line.strip())
        if parsed is None:
            raise EagleError(f"the server's metrics have a line that is no Prometheus sample: {line[:200]}")
        labels = {m["name"]: _unescaped(m["value"]) for m in _LABEL.finditer(parsed["labels"] or "")}
        yield Sample(parsed["name"], labels, float(parsed["value"]))


def totals(text: str) -> SpecCounters | None:
    """Counters since the server started, summed over its engines; None if it does not speculate.

    Raises:
        EagleError: the counters contradict each other, or some are missing.
    """
    found = {VERIFY_STEPS: 0, DRAFTED: 0, ACCEPTED: 0}
    at: dict[int, int] = {}
    seen = set()
    for sample in samples(text):
        if sample.name in found:
            found[sample.name] += int(sample.value)
        elif sample.name == ACCEPTED_AT:
            position = int(sample.labels["position"])  # from 0
            at[position] = at.get(position, 0) + int(sample.value)
        else:
            continue
        seen.add(sample.name)
    if not seen:
        return None
    if missing := {*found, ACCEPTED_AT} - seen:
        raise EagleError(f"the server's metrics lack {', '.join(sorted(missing))}")
    accepted_at = tuple(at.get(i, 0) for i in range(max(at) + 1))
    if sum(accepted_at) != found[ACCEPTED]:
        raise EagleError(
            f"the server's metrics count {found[ACCEPTED]} accepted drafts, but {accepted_at} by position: the figures"
            " cannot both be right"
        )
    return _checked(found[VERIFY_STEPS], found[DRAFTED], accepted_at, "the server's metrics")


def request_counters(figures: Mapping[str, Any]) -> SpecCounters:
    """Counters of one request, from `metrics.speculative_decoding` of its response.

    Raises:
        EagleError: the figures contradict each other.
    """
    return by_histogram(figures["acceptance_histogram"], int(figures["num_draft_tokens"]), "the response's metrics")


def by_histogram(histogram: Sequence[int], drafted: int, where: str) -> SpecCounters:
    """Counters from `histogram`: [j] verify steps accepted exactly j drafts, j = 0..k. So A_i = sum of [j >= i].

    Raises:
        EagleError: figures that contradict each other, in `where`.
    """
    at_least = list(accumulate(reversed(histogram)))[::-1]
    return _checked(at_least[0], drafted, tuple(at_least[1:]), where)


def cache_config(text: str) -> Mapping[str, str]:
    """The server's settings of its key-value cache, by their names in vLLM's CacheConfig.

    Raises:
        EagleError: the metrics do not have them.
    """
    for sample in samples(text):
        if sample.name == CACHE:
            return sample.labels
    raise EagleError(f"the server's metrics lack {CACHE}: it is no vLLM, or runs with disable_log_stats")


def _checked(verify_steps: int, drafted: int, accepted_at: tuple[int, ...], where: str) -> SpecCounters:
    try:
        return SpecCounters(verify_steps, drafted, accepted_at)
    except ValueError as error:
        raise EagleError(f"{where}: {error}") from error


def _unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda escape: _ESCAPED.get(escape[0], escape[0]), text)
