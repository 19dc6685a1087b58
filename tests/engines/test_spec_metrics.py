"""Counters out of texts whose figures were written by hand."""

from __future__ import annotations

import pytest

from eagle3x.engines.spec_metrics import cache_config, request_counters, samples, totals
from eagle3x.types import EagleError, SpecCounters

# As vLLM 0.32 writes it, shortened.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 26.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7960206499447134e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 78.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 19.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="2"} 13.0
vllm:cache_config_info{block_size="128",enable_prefix_caching="False",engine="0",num_gpu_blocks="64"} 1.0
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 9.0
"""


def test_totals_by_position() -> None:
    assert totals(METRICS) == SpecCounters(26, 78, (19, 18, 13))


def test_totals_are_summed_over_the_engines_of_a_server() -> None:
    assert totals(METRICS + METRICS.replace('engine="0"', 'engine="1"')) == SpecCounters(52, 156, (38, 36, 26))


def test_a_server_without_speculation_has_no_totals() -> None:
    plain = "\n".join(line for line in METRICS.splitlines() if "spec_decode" not in line)
    assert totals(plain) is None


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            METRICS.replace("_accepted_tokens_total{", "_other_total{"),
            "lack vllm:spec_decode_num_accepted_tokens_total",
        ),
        (METRICS.replace(" 50.0", " 51.0"), r"count 51 accepted drafts, but \(19, 18, 13\)"),
        (METRICS.replace(" 26.0", " 18.0"), "must fall"),
        ("vllm:something{ 1.0", "no Prometheus sample"),
    ],
)
def test_figures_that_cannot_be_right(broken: str, said: str) -> None:
    with pytest.raises(EagleError, match=said):
        totals(broken)


def test_what_prometheus_escapes() -> None:
    (sample,) = samples(r'up{path="C:\\new \"x\", y=\n",other="}"} -1.5e3 1700000000000')
    assert sample.labels == {"path": 'C:\\new "x", y=\n', "other": "}"}
    assert (sample.name, sample.value) == ("up", -1500.0)


def test_cache_config() -> None:
    assert cache_config(METRICS)["num_gpu_blocks"] == "64"
    with pytest.raises(EagleError, match="cache_config_info"):
        cache_config("up 1.0")


def test_counters_of_a_request() -> None:
    """Two steps accepted nothing, one 1, none 2, four 3: at least 1 in five, at least 2 and 3 in four."""
    figures = {"acceptance_histogram": [2, 1, 0, 4], "num_draft_tokens": 20, "mean_acceptance_length": 2.86}
    assert request_counters(figures) == SpecCounters(7, 20, (5, 4, 4))


def test_a_request_that_never_was_verified() -> None:
    assert request_counters({"acceptance_histogram": [0, 0, 0, 0], "num_draft_tokens": 0}) == SpecCounters.zero(3)
