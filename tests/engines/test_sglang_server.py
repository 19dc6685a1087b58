"""A real SGLang server on the CPU with the known-answer pair: every figure was known before it ran.

Two servers are started for all tests of this file, with and without the drafter, at the same time: 40
seconds. Needs the environment that `make env-sglang-cpu` lays.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sglang_pair import (
    CHAIN,
    EOS_AT,
    LENGTH,
    REQUESTS,
    SETTLE_SECONDS,
    TREE,
    K,
    asked_of,
    check,
    launch_of,
    scaled_pair,
    settled,
)

from eagle3x.config import Hardware
from eagle3x.diagnosis.known_answer import EOS, PROMPT, VOCAB, KnownAnswer
from eagle3x.engines import adapter, sglang_report
from eagle3x.engines.child import EngineDied
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.ports import taken
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.engines.sglang_attach import attach, reported
from eagle3x.engines.sglang_serve import Launch, differences, serve
from eagle3x.types import Completion, EagleError, Request, SpecCounters, total

pytestmark = pytest.mark.usefixtures("no_other_engine")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> KnownAnswer:
    return scaled_pair(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def launch(known: KnownAnswer, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch_of(known, tmp_path_factory.mktemp("logs") / "sglang.log")


@pytest.fixture(scope="module")
def both(launch: Launch, known: KnownAnswer) -> Iterator[tuple[ServerEndpoint, ServerEndpoint]]:
    """With the drafter and without."""
    with ThreadPoolExecutor(2) as threads:
        starting = [
            threads.submit(serve, launch, known.drafter_dir, CHAIN),
            threads.submit(serve, replace(launch, log=launch.log.with_name("plain.log")), None, None),
        ]
    endpoints = [future.result() for future in starting if future.exception() is None]
    try:
        yield starting[0].result(), starting[1].result()
    finally:
        for endpoint in endpoints:
            endpoint.close()


@pytest.fixture(scope="module")
def speculating(both: tuple[ServerEndpoint, ServerEndpoint]) -> ServerEndpoint:
    return both[0]


@pytest.fixture(scope="module")
def plain(both: tuple[ServerEndpoint, ServerEndpoint]) -> ServerEndpoint:
    return both[1]


def test_stop_in_mid_draft_and_counts_past_it(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    (done,) = speculating.complete([Request("eos", PROMPT, 40)], 1)
    assert done.token_ids == known.output(PROMPT, 40)
    assert len(done.token_ids) == EOS_AT
    assert done.token_ids[-1] == EOS
    assert done.finish == "stop"
    assert done.counters is not None
    assert done.counters == known.counters(PROMPT, 40)
    # The first token comes of the prefill, each step yields one more than it accepts: two more than were sent.
    assert done.counters.verify_steps + done.counters.accepted == EOS_AT - 1 + 2
    assert speculating.counts_past_stop


def test_every_draft_is_right(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    """Of 28 tokens after the first, none is missing from the draft vocabulary: tau is k + 1 exactly."""
    (done,) = speculating.complete([Request("all", (13,), 29, ignore_eos=True)], 1)
    assert done.counters == SpecCounters(7, 7 * K, (7, 7, 7)) == known.counters((13,), 29, ignore_eos=True)


def test_eight_at_a_time(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    before = speculating.totals()
    assert before is not None
    completions = list(speculating.complete(REQUESTS, 8))
    check(completions, REQUESTS, known)
    counted = [c.counters for c in completions]
    wanted = [known.counters(r.prompt_ids, r.max_tokens, r.ignore_eos) for r in asked_of(completions, REQUESTS)]
    assert counted == wanted
    assert settled(speculating, before, total(wanted)) == total(wanted)
    assert 1 < _most_in_flight(completions) <= 8
    assert {c.cached_tokens for c in completions} == {0}


def test_one_at_a_time(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    completions = list(speculating.complete(REQUESTS[:4], 1))
    assert [c.id for c in completions] == [r.id for r in REQUESTS[:4]]
    check(completions, REQUESTS, known)
    assert _most_in_flight(completions) == 1


def test_a_single_token_takes_no_verify_step(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    (done,) = speculating.complete([Request("one", PROMPT, 1)], 1)
    assert (done.token_ids, done.counters) == (known.output(PROMPT, 1), SpecCounters.zero(K))


def test_nothingasked_of(speculating: ServerEndpoint) -> None:
    assert list(speculating.complete([], 4)) == []


def test_top2_gaps_are_the_targets(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    from transformers import LlamaForCausalLM

    # Of a text of 30 tokens, and of one that stops in mid-draft.
    for asked in (
        Request("gaps", PROMPT, 30, ignore_eos=True, top2_gaps=True),
        Request("stop", PROMPT, 30, top2_gaps=True),
    ):
        (done,) = speculating.complete([asked], 1)
        assert done.token_ids == known.output(PROMPT, 30, asked.ignore_eos)
        model = LlamaForCausalLM.from_pretrained(known.target_dir, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *done.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        assert done.top2_gaps is not None
        assert done.top2_gaps == pytest.approx((first - second).tolist(), abs=1e-3)
        assert len({round(gap, 2) for gap in done.top2_gaps}) > 15  # or a shift by one would not be seen


def test_what_is_refused(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    with pytest.raises(EagleError, match=f"request big: token {VOCAB} is out of the target's vocabulary of {VOCAB}"):
        speculating.complete([Request("ok", PROMPT, 9), Request("big", (VOCAB,), 9)], 2)
    with pytest.raises(EagleError, match=r"request long: the server refuses it \(400\): .*context length"):
        list(speculating.complete([Request("long", PROMPT, LENGTH + 1)], 1))
    with pytest.raises(EagleError, match=r"request hot has temperature 0\.7: SGLang verifies greedily on a CPU"):
        speculating.complete([Request("hot", PROMPT, 9, temperature=0.7)], 1)
    check(list(speculating.complete(REQUESTS[:2], 2)), REQUESTS, known)


def test_a_pass_that_is_left_is_dropped_by_the_server(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    long = Request("long", PROMPT, 450, ignore_eos=True)
    before = speculating.totals()
    assert before is not None
    answers = speculating.complete([Request("short", PROMPT, 2), long], 2)
    assert isinstance(answers, Iterator)
    assert next(answers).id == "short"
    answers.close()  # type: ignore[attr-defined]  # a generator
    whole = known.counters(long.prompt_ids, long.max_tokens, long.ignore_eos)
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := _moved(speculating, before)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    # An aborted request is counted when it ends: one step of the short request, a few of the long one.
    assert 1 < found < whole.verify_steps


def test_attached(speculating: ServerEndpoint, launch: Launch, known: KnownAnswer) -> None:
    url = speculating.server.url
    with attach(url, launch.target, known.drafter_dir, CHAIN) as attached:
        assert attached.per_request_counters
        before = attached.totals()
        attached.flush_prefix_cache()
        completions = list(attached.complete(REQUESTS[:6], 3))
        check(completions, REQUESTS, known)
        ours = total([c.counters for c in completions if c.counters is not None])
        assert settled(attached, before, ours) == ours
        # Another user's request moves the server's verify steps, and not what was accepted in ours.
        (other,) = speculating.complete([Request("other", PROMPT, 20, ignore_eos=True)], 1)
        assert other.counters is not None
        theirs = ours.verify_steps + other.counters.verify_steps
        foreign = SpecCounters(theirs, ours.drafted, ours.accepted_at)
        assert settled(attached, before, foreign) == foreign
        with pytest.raises(EagleError, match="SGLang verifies greedily on a CPU"):
            attached.complete([Request("hot", PROMPT, 9, temperature=0.7)], 1)
    speculating.server.check()  # still runs


def test_a_backend_that_is_attached(speculating: ServerEndpoint, launch: Launch, known: KnownAnswer) -> None:
    """By its URL alone: what it is comes from the server."""
    backend = Backend(
        name="sglang", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=4,
        engine_args={}, python=None, url=speculating.server.url, port=None, memory_fraction=0.3, start_timeout=9.0,
    )  # fmt: skip
    slot, cpu = Slot("serve", backend, Quantization("none"), Attention("auto")), Hardware("cpu", None, None)
    identity = adapter("sglang").identity(slot, launch.target, cpu)
    told = {"attached": True, "version": "0.5.23", "attention": "intel_amx", "dtype": "float32", "device": "cpu"}
    assert told.items() <= identity.items()
    assert adapter("sglang").refusals(slot, launch.target, cpu) == []
    other = replace(slot, backend=replace(backend, port=1, engine_args={"a": 1}))
    assert len(adapter("sglang").refusals(other, launch.target, cpu)) == 2
    nowhere = replace(slot, backend=replace(backend, url="http://127.0.0.1:9"))
    (reason,) = adapter("sglang").refusals(nowhere, launch.target, cpu)
    assert "ConnectError" in reason
    with adapter("sglang").open(slot, launch.target, cpu, Job(LENGTH, launch.log.parent)) as engine:
        assert (engine.can_serve_plain, engine.native_layer_ids((3, 5, 8))) == (False, [2, 4, 7])
        with engine.serve(known.drafter_dir, CHAIN) as endpoint:
            check(list(endpoint.complete(REQUESTS[:2], 2)), REQUESTS, known)
        check(list(engine.generate(REQUESTS[2:4])), REQUESTS, known)
        with pytest.raises(EagleError, match="a server hands out no hidden states"):
            engine.capture([], (3, 5, 8))


def test_what_is_refused_when_attaching(
    both: tuple[ServerEndpoint, ServerEndpoint], launch: Launch, known: KnownAnswer
) -> None:
    url, plain_url = (endpoint.server.url for endpoint in both)
    with pytest.raises(EagleError, match=r"speculates with num_speculative_tokens=3, topk=1, num_draft_tokens=4, but"):
        attach(url, launch.target, known.drafter_dir, TREE)
    with pytest.raises(EagleError, match="but no drafter was asked for"):
        attach(url, launch.target, None, None)
    with pytest.raises(EagleError, match="speculates with no drafter, but num_speculative_tokens=3"):
        attach(plain_url, launch.target, known.drafter_dir, CHAIN)
    other = replace(launch.target, model_class="Qwen3ForCausalLM")
    with pytest.raises(EagleError, match="a LlamaForCausalLM, and target known is a Qwen3ForCausalLM"):
        attach(url, other, known.drafter_dir, CHAIN)
    with pytest.raises(EagleError, match=r"/server_info: ConnectError"):
        reported("http://127.0.0.1:9")


def test_what_differs_from_what_wasasked_of(speculating: ServerEndpoint, launch: Launch, known: KnownAnswer) -> None:
    """What the real server says of itself, compared with what it was not asked."""
    info = json.loads(speculating.get("/server_info"))
    assert differences(launch, info, known.drafter_dir, CHAIN) == []
    arguments = {**launch.arguments, "dtype": "bfloat16", "context_length": 1024, "no_such": 1, "quantization": "fp8"}
    other = replace(launch, attention="torch_native", quantization="fp8", arguments=arguments)
    assert differences(other, info, None, None) == [
        "attention: asked ['torch_native'], serves with ['intel_amx']",
        "quantization: asked fp8, serves with None",
        "dtype: asked bfloat16, serves with float32",
        "context_length: asked 1024, serves with 512",
        "no_such: asked 1, serves with nothing of that name",
        "algorithm: asked None, serves with EAGLE3",
        f"drafter: asked None, serves with {known.drafter_dir}",
        f"speculation: asked None, serves with {CHAIN}",
    ]
    with pytest.raises(EagleError, match="/server_info lacks 'version'"):
        sglang_report.read({k: v for k, v in info.items() if k != "version"})


def test_both_sides_alike(speculating: ServerEndpoint, plain: ServerEndpoint, known: KnownAnswer) -> None:
    """Cache, settings, and every token that they write; the text is known, so none of it is by chance."""
    with_drafter, without = (reported(e.server.url) for e in (speculating, plain))
    assert replace(with_drafter, algorithm=None, drafter=None, speculation=None) == without
    assert without.kv_tokens == 8 * (LENGTH + 256)
    assert plain.totals() is None
    completions = list(plain.complete(REQUESTS, 8))
    check(completions, REQUESTS, known)
    assert {c.counters for c in completions} == {None}
    texts = [{c.id: c.token_ids for c in e.complete(REQUESTS, 4)} for e in (speculating, plain)]
    assert texts[0] == texts[1]


def test_sampling_without_a_drafter(plain: ServerEndpoint, known: KnownAnswer) -> None:
    """The second best token is e^26 times less likely, so that every sample is the known text."""
    asked = [Request("warm", PROMPT, 12, temperature=1.0, top_p=0.9, seed=7)]
    assert [c.token_ids for c in plain.complete(asked, 1)] == [known.output(PROMPT, 12)]


def test_a_killed_server(plain: ServerEndpoint, launch: Launch) -> None:
    """Last of its server: nothing of it is left, and the error says where to look."""
    assert plain.server.child is not None
    _check_death(plain, plain.server.child.pid, "was ended by SIGKILL", launch.log.with_name("plain.log"))


def test_a_killed_scheduler(speculating: ServerEndpoint, launch: Launch) -> None:
    """Last of its server. The scheduler is what runs out of memory; the server ends because of it."""
    assert speculating.server.child is not None
    schedulers = [
        pid
        for pid in speculating.server.child.processes()
        if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    _check_death(speculating, schedulers[0], "exited with code|was ended by", launch.log)


def _most_in_flight(completions: Sequence[Completion]) -> int:
    """By the times themselves: how many were sent and not finished at once."""
    moments = sorted([(c.timing.start, 1) for c in completions] + [(c.timing.end, -1) for c in completions])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def _moved(endpoint: ServerEndpoint, before: SpecCounters) -> int:
    after = endpoint.totals()
    assert after is not None
    return after.verify_steps - before.verify_steps


def _check_death(endpoint: ServerEndpoint, pid: int, how: str, log: Path) -> None:
    child, url = endpoint.server.child, endpoint.server.url
    assert child is not None
    long = Request("long", PROMPT, 450, ignore_eos=True)
    answers = iter(endpoint.complete([Request("short", PROMPT, 2), long], 2))
    assert next(answers).id == "short"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match=how) as died:
        list(answers)
    assert f"its log is {log} and ends:\n" in str(died.value)
    with pytest.raises(EngineDied):
        endpoint.get("/metrics")
    endpoint.close()
    assert child.processes() == []
    assert not taken(int(url.rpartition(":")[2]))
