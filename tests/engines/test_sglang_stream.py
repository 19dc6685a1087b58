"""What SGLang is sent for a request, and what is made of its answer. The rest is in test_sglang_server.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3x.benchmark.config import Speculation
from eagle3x.engines.server_stream import ServerFailed
from eagle3x.engines.sglang_metrics import request_counters, verify_steps
from eagle3x.engines.sglang_report import read
from eagle3x.engines.sglang_stream import GenerateDialect, _Answer
from eagle3x.targets import Target
from eagle3x.types import EagleError, Request, SpecCounters, Timing

REQUEST = Request("a", (5, 6, 7), max_tokens=9, temperature=0.5, top_p=0.9, seed=4)
CHAIN, TREE = Speculation.chain(3), Speculation(num_speculative_tokens=3, topk=2, num_draft_tokens=7)
META = {
    "completion_tokens": 40, "spec_verify_ct": 11, "spec_num_correct_drafts": 31, "spec_num_proposed_drafts": 33,
    "spec_correct_drafts_histogram": [0, 0, 2, 9], "spec_accept_length": 40 / 11,
}  # fmt: skip
"""As SGLang 0.5.23 answered: k + 1 = 4 is certain but for two steps, and 40 tokens came of 11 steps and a prefill."""


def test_nothing_is_left_to_the_servers_defaults(tiny_target: Target) -> None:
    """A server takes its defaults from the model's own generation config."""
    dialect = GenerateDialect(tiny_target, CHAIN, metrics=True)
    asked = dialect.body(REQUEST, None)
    assert asked == {
        "input_ids": [5, 6, 7],
        "sampling_params": {
            "max_new_tokens": 9, "ignore_eos": False, "stop_token_ids": list(tiny_target.eos_token_ids),
            "no_stop_trim": True, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "sampling_seed": 4,
        },
        "stream": True,
    }  # fmt: skip
    ignoring = dialect.body(replace(REQUEST, ignore_eos=True), "salt")
    assert (ignoring["sampling_params"]["stop_token_ids"], ignoring["extra_key"]) == ([], "salt")
    assert dialect.body(replace(REQUEST, top2_gaps=True), None)["top_logprobs_num"] == 2


@pytest.mark.parametrize("wrong", [-1, 128])
def test_a_token_that_would_end_the_server(wrong: int, tiny_target: Target) -> None:
    with pytest.raises(EagleError, match=f"request a: token {wrong} is out of the target's vocabulary of 128"):
        GenerateDialect(tiny_target, None, metrics=False).body(replace(REQUEST, prompt_ids=(5, wrong)), None)


def test_counters_of_a_request() -> None:
    assert request_counters(META, CHAIN) == SpecCounters(11, 33, (11, 11, 9))
    proposed = {**META, "spec_num_proposed_drafts": 66}
    assert request_counters(proposed, TREE) == SpecCounters(11, 66, (11, 11, 9))
    # Its histogram ends with the most that were accepted in a step.
    short = {**META, "spec_correct_drafts_histogram": [8, 3], "spec_num_correct_drafts": 3}
    assert request_counters(short, CHAIN) == SpecCounters(11, 33, (3, 0, 0))
    # 0.5.14 names fewer of them.
    assert request_counters({"completion_tokens": 9, "spec_correct_drafts_histogram": [1, 1]}, CHAIN) == SpecCounters(
        2, 6, (1, 0, 0)
    )
    assert request_counters({"completion_tokens": 1}, CHAIN) == SpecCounters.zero(3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec_correct_drafts_histogram": []}, "lacks spec_correct_drafts_histogram"),
        ({"spec_correct_drafts_histogram": [0, 0, 2, 8, 1]}, "4 drafts were accepted in a step, at most 3 can be"),
        ({"spec_verify_ct": 12}, "spec_verify_ct is 12, by its histogram"),
        ({"spec_num_correct_drafts": 30}, "spec_num_correct_drafts is 30"),
        ({"spec_num_proposed_drafts": 66}, "spec_num_proposed_drafts is 66"),
    ],
)
def test_figures_that_cannot_be_right(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EagleError, match=said):
        request_counters(META | changes, CHAIN)


def test_the_servers_verify_steps() -> None:
    name = "sglang:spec_verify_calls_total"
    text = f'# TYPE {name} counter\n{name}{{model_name="m",dp="0"}} 5.0\n{name}{{model_name="m",dp="1"}} 7.0\nx 3\n'
    assert verify_steps(text) == 12
    assert verify_steps("x 3\n") == 0


def answer(request: Request, *events: tuple[list[int], dict[str, Any]]) -> _Answer:
    read_so_far = _Answer(request)
    for now, (ids, meta) in enumerate(events):
        read_so_far.read(float(now), {"output_ids": ids, "meta_info": meta})
    return read_so_far


def top(*gaps: float) -> list[list[list[Any]]]:
    return [[[-1.0, 3, None], [-1.0 - gap, 4, None]] for gap in gaps]


@pytest.mark.parametrize("second", [[5, 6, 2], [6, 2]])
def test_tokens_of_a_stream_come_whole_or_as_the_new_ones(second: list[int]) -> None:
    """As the server was started (incremental_streaming_output)."""
    asked = replace(REQUEST, top2_gaps=True)
    last = {
        "completion_tokens": 3, "finish_reason": {"type": "stop", "matched": 2}, "cached_tokens": 1,
        "output_top_logprobs": top(0.5, 0.25, 2.0)[-len(second) :],
    }  # fmt: skip
    events = (([5], {"completion_tokens": 1, "output_top_logprobs": top(0.5)}), (second, last))
    done = answer(asked, *events).completion(-1.0, (2,), None)
    assert (done.token_ids, done.finish, done.cached_tokens) == ((5, 6, 2), "stop", 1)
    assert done.top2_gaps == (0.5, 0.25, 2.0)
    assert done.timing == Timing(-1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("ids", "reason", "tokens", "error", "said"),
    [
        ([5], {"type": "abort", "message": "no memory"}, 1, ServerFailed, "gave up .*no memory"),
        ([5], None, 1, ServerFailed, "gave up"),
        ([5, 6], {"type": "length"}, 2, EagleError, "ended it after 2 of 9 tokens: its context is too short"),
        ([5, 3], {"type": "stop", "matched": 3}, 2, EagleError, r"stopped at token 3, which is none of .* \[2\]"),
        ([5, 2], {"type": "stop", "matched": 2}, 3, EagleError, "says that it wrote 3 tokens, and sent 2"),
    ],
)
def test_answers_that_are_none(ids: list[int], reason: Any, tokens: int, error: type[EagleError], said: str) -> None:
    read_so_far = answer(REQUEST, (ids, {"completion_tokens": tokens, "finish_reason": reason}))
    with pytest.raises(error, match=said):
        read_so_far.completion(0.0, (2,), None)


def test_a_way_to_speculate_that_is_none_of_ours() -> None:
    names = (
        "version", "model_path", "served_model_name", "device", "dtype", "kv_cache_dtype", "quantization",
        "attention_backend", "prefill_attention_backend", "decode_attention_backend", "tp_size", "disable_radix_cache",
        "enable_metrics", "max_total_num_tokens", "speculative_draft_model_path",
        "speculative_draft_model_quantization",
    )  # fmt: skip
    info: dict[str, Any] = dict.fromkeys(names, None) | {
        "speculative_algorithm": "NGRAM", "speculative_num_steps": None, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 12,
        "internal_states": [{"kv_cache_dtype": "auto", "effective_max_running_requests_per_dp": 8}],
    }  # fmt: skip
    with pytest.raises(EagleError, match=r"speculates by NGRAM with speculative_num_steps=None.*no chain and no tree"):
        read(info)
    eagle = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 2}
    assert read(info | eagle | {"speculative_num_draft_tokens": 7}).speculation == TREE
    chain = {**eagle, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    assert read(info | chain).speculation == CHAIN
