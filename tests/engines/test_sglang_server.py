"""A real SGLang server on the CPU with the known-answer pair: every figure was known before it ran.

Two servers are started for nearly all tests of this file, with and without the drafter, at the same time: 40 seconds.
Needs the environment that `make env-sglang-cpu` lays.
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
from safetensors.torch import load_file, save_file

from eagle3x.benchmark.config import Speculation
from eagle3x.config import Hardware, TargetConfig
from eagle3x.diagnosis.known_answer import EOS, PROMPT, START, VOCAB, KnownAnswer, build, variants
from eagle3x.engines import adapter, interpreter, sglang_report
from eagle3x.engines.child import EngineDied
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.ports import taken
from eagle3x.engines.server import Server
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.engines.sglang_attach import attach, reported
from eagle3x.engines.sglang_serve import Launch, argv, capacity, differences, serve
from eagle3x.targets import resolve
from eagle3x.types import Completion, EagleError, Request, SpecCounters, total

pytestmark = pytest.mark.usefixtures("no_other_engine")

K = 3
EOS_AT = 18
"""The third token of a verify step: two drafts before it are accepted, and what comes behind it is counted too."""
MISSING = (11, 12)
LENGTH = 512
SETTLE_SECONDS = 10.0
CHAIN = Speculation.chain(K)
TREE = Speculation(num_speculative_tokens=K, topk=2, num_draft_tokens=7)
REQUESTS = tuple(
    Request(f"{start}", (40, 9, start), max_tokens=5 + 3 * (start % 9), ignore_eos=start % 2 == 0)
    for start in range(START, START + 24)
    if start != EOS
)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> KnownAnswer:
    """The pair, its target's logits scaled by the token they follow: other top-2 gaps, the same text."""
    pair = build(tmp_path_factory.mktemp("known"), K, MISSING, EOS_AT)
    file = pair.target_dir / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][:, :VOCAB] *= 1 + torch.arange(VOCAB) / VOCAB
    save_file(weights, file, metadata={"format": "pt"})
    return pair


@pytest.fixture(scope="module")
def launch(known: KnownAnswer, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    target = resolve(
        TargetConfig(
            name="known", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
            trust_remote_code=False, aux_layer_ids=(3, 5, 8),
        )
    )  # fmt: skip
    arguments = {
        "model_path": str(known.target_dir), "device": "cpu", "dtype": "float32", "attention_backend": "torch_native",
        "prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx",
        "sampling_backend": "pytorch", "grammar_backend": "none", "disable_cuda_graph": True,
        "disable_radix_cache": True, "skip_tokenizer_init": True, "sleep_on_idle": True, "random_seed": 0,
        "mem_fraction_static": 0.3, **capacity(8, LENGTH, LENGTH),
    }  # fmt: skip
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return Launch(
        interpreter.find("sglang", None, "cpu"), target, arguments, variables, device="cpu", attention="intel_amx",
        quantization=None, log=tmp_path_factory.mktemp("logs") / "sglang.log", timeout=400,
    )  # fmt: skip


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
    _check(completions, REQUESTS, known)
    counted = [c.counters for c in completions]
    wanted = [known.counters(r.prompt_ids, r.max_tokens, r.ignore_eos) for r in _asked(completions, REQUESTS)]
    assert counted == wanted
    assert _settled(speculating, before, total(wanted)) == total(wanted)
    assert 1 < _most_in_flight(completions) <= 8
    assert {c.cached_tokens for c in completions} == {0}


def test_one_at_a_time(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    completions = list(speculating.complete(REQUESTS[:4], 1))
    assert [c.id for c in completions] == [r.id for r in REQUESTS[:4]]
    _check(completions, REQUESTS, known)
    assert _most_in_flight(completions) == 1


def test_a_single_token_takes_no_verify_step(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    (done,) = speculating.complete([Request("one", PROMPT, 1)], 1)
    assert (done.token_ids, done.counters) == (known.output(PROMPT, 1), SpecCounters.zero(K))


def test_nothing_asked(speculating: ServerEndpoint) -> None:
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
    _check(list(speculating.complete(REQUESTS[:2], 2)), REQUESTS, known)


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
        _check(completions, REQUESTS, known)
        ours = total([c.counters for c in completions if c.counters is not None])
        assert _settled(attached, before, ours) == ours
        # Another user's request moves the server's verify steps, and not what was accepted in ours.
        (other,) = speculating.complete([Request("other", PROMPT, 20, ignore_eos=True)], 1)
        assert other.counters is not None
        theirs = ours.verify_steps + other.counters.verify_steps
        foreign = SpecCounters(theirs, ours.drafted, ours.accepted_at)
        assert _settled(attached, before, foreign) == foreign
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
            _check(list(endpoint.complete(REQUESTS[:2], 2)), REQUESTS, known)
        _check(list(engine.generate(REQUESTS[2:4])), REQUESTS, known)
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


def test_what_differs_from_what_was_asked(speculating: ServerEndpoint, launch: Launch, known: KnownAnswer) -> None:
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
    _check(completions, REQUESTS, known)
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


@pytest.mark.long
@pytest.mark.parametrize("names", [("all_late", "slot_1_early"), ("slots_102", "missing_ids")])
def test_a_wrong_slot_is_never_accepted(
    names: tuple[str, ...], launch: Launch, known: KnownAnswer, tmp_path: Path
) -> None:
    """Every id late by one, one early; slots swapped; no ids, so that SGLang takes its default: nothing is accepted."""
    made = {v.name: v for v in variants(known, tmp_path)}
    asked = [Request(f"{start}", (start,), 20, ignore_eos=True) for start in (3, 10, 27)]

    def counted(name: str) -> SpecCounters:
        with serve(replace(launch, log=tmp_path / f"{name}.log"), made[name].drafter_dir, CHAIN) as endpoint:
            completions = list(endpoint.complete(asked, 3))
        _check(completions, asked, known)
        return total([c.counters for c in completions if c.counters is not None])

    with ThreadPoolExecutor(len(names)) as threads:
        assert list(threads.map(counted, names)) == [SpecCounters(57, 57 * K, (0, 0, 0))] * len(names)


def test_a_tree_and_a_prefix_cache(launch: Launch, known: KnownAnswer, tmp_path: Path) -> None:
    """Attached, as to a user's server, with a prefix cache that each pass must meet empty."""
    users = replace(launch, arguments={**launch.arguments, "disable_radix_cache": False}, log=tmp_path / "tree.log")
    started = Server.launch(
        lambda port: argv(users, port, known.drafter_dir, TREE), log=users.log, env=users.environment, timeout=400
    )
    prompt = tuple(range(START, START + 40))
    asked = [Request(f"{n}", (*prompt, n), 30, ignore_eos=True) for n in (20, 31, 44)]
    with started, attach(started.url, launch.target, known.drafter_dir, TREE) as endpoint:
        for _ in range(2):
            endpoint.flush_prefix_cache()
            before = endpoint.totals()
            completions = list(endpoint.complete(asked, 1))
            _check(completions, asked, known)
            # The drafter's best path is in every tree, so it accepts what a chain does; it drafts twice as much.
            chain = [known.counters(r.prompt_ids, r.max_tokens, r.ignore_eos) for r in asked]
            wanted = [replace(c, drafted=c.verify_steps * 6) for c in chain]
            assert [c.counters for c in completions] == wanted
            assert _settled(endpoint, before, total(wanted)) == total(wanted)
            # The first request of a pass finds nothing; the next ones what they share with it.
            assert completions[0].cached_tokens == 0
            assert all(0 < (c.cached_tokens or 0) <= len(prompt) for c in completions[1:])
        assert "prefix_cache=True" in repr(reported(started.url))


def test_a_server_that_cannot_start(launch: Launch, tmp_path: Path) -> None:
    wrong = replace(launch, arguments={**launch.arguments, "no_such_argument": 1}, log=tmp_path / "wrong.log")
    with pytest.raises(EngineDied, match=r"(?s)exited with code 2.*unrecognized arguments: --no-such-argument"):
        serve(wrong, None, None)


def test_command_line(launch: Launch, known: KnownAnswer) -> None:
    def given(words: Sequence[str]) -> dict[str, str]:
        return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}

    words = argv(launch, 1234, known.drafter_dir, TREE)
    assert words[1:7] == ["-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", "1234"]
    speculative = {name: value for name, value in given(words).items() if name.startswith("--speculative")}
    assert speculative == {
        "--speculative-algorithm": "EAGLE3", "--speculative-draft-model-path": str(known.drafter_dir),
        "--speculative-draft-model-quantization": "unquant", "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "2", "--speculative-num-draft-tokens": "7",
    }  # fmt: skip
    assert given(argv(launch, 1, known.drafter_dir, CHAIN))["--speculative-num-draft-tokens"] == "4"
    assert not any("speculative" in word for word in argv(launch, 1, None, None))
    wrong = replace(launch, arguments={**launch.arguments, "port": 1, "speculative_algorithm": "EAGLE"})
    for drafter, speculation in ((known.drafter_dir, CHAIN), (None, None)):
        with pytest.raises(EagleError, match=r"engine_args: port, speculative_algorithm cannot be set there"):
            argv(wrong, 1, drafter, speculation)
    wide = Speculation(num_speculative_tokens=17, topk=8, num_draft_tokens=64)
    with pytest.raises(EagleError, match="needs 272 tokens of KV cache for the drafts of a request, and 256 are kept"):
        serve(launch, known.drafter_dir, wide)
    with pytest.raises(ValueError, match="arguments lack max_running_requests"):
        replace(launch, arguments={k: v for k, v in launch.arguments.items() if k != "max_running_requests"})


def _check(completions: Sequence[Completion], requests: Sequence[Request], known: KnownAnswer) -> None:
    for asked, done in zip(_asked(completions, requests), completions, strict=True):
        assert done.token_ids == known.output(asked.prompt_ids, asked.max_tokens, asked.ignore_eos)
        assert done.finish == ("stop" if not asked.ignore_eos and done.token_ids[-1] == EOS else "length")
        assert len(done.token_ids) == asked.max_tokens or not asked.ignore_eos
        assert done.timing.start < done.timing.first_token < done.timing.end


def _asked(completions: Sequence[Completion], requests: Sequence[Request]) -> list[Request]:
    by_id = {r.id: r for r in requests}
    return [by_id[c.id] for c in completions]


def _most_in_flight(completions: Sequence[Completion]) -> int:
    """By the times themselves: how many were sent and not finished at once."""
    moments = sorted([(c.timing.start, 1) for c in completions] + [(c.timing.end, -1) for c in completions])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def _settled(endpoint: ServerEndpoint, before: SpecCounters | None, wanted: SpecCounters) -> SpecCounters | None:
    """The totals' difference."""
    deadline = time.monotonic() + SETTLE_SECONDS
    assert before is not None
    while True:
        after = endpoint.totals()
        assert after is not None
        if after - before == wanted or time.monotonic() > deadline:
            return after - before
        time.sleep(0.05)


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
