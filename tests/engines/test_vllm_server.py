"""A real vLLM server on the CPU with the known-answer pair: every figure was known before it ran.

Two servers are started, with and without the drafter, about a minute each, for all tests of this file.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3x.benchmark.config import Speculation
from eagle3x.config import TargetConfig
from eagle3x.diagnosis.known_answer import EOS, PROMPT, START, VOCAB, KnownAnswer, build, variants
from eagle3x.engines import interpreter, vllm_log
from eagle3x.engines.child import EngineDied
from eagle3x.engines.ports import taken
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.engines.spec_metrics import cache_config, samples
from eagle3x.engines.vllm_attach import attach
from eagle3x.engines.vllm_serve import Launch, argv, capacity, differences, serve
from eagle3x.targets import resolve
from eagle3x.types import Completion, EagleError, Request, SpecCounters, total

pytestmark = pytest.mark.usefixtures("no_other_engine")

K = 3
EOS_AT = 18
"""The third token of a verify step: two drafts before it are accepted, and what comes behind it is counted too."""
MISSING = (11, 12)
LENGTH = 512
SETTLE_SECONDS = 10.0
SPECULATION = Speculation.chain(K)
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
        "model": str(known.target_dir), "dtype": "float32", "enable_prefix_caching": False, "enforce_eager": True,
        "generation_config": "vllm", "seed": 0, **capacity(8, LENGTH, LENGTH, 128),
    }  # fmt: skip
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    return Launch(
        interpreter.find("vllm", None, "cpu"), target, arguments, variables, device="cpu", runner="v1",
        attention="CPU_ATTN", quantization=None, log=tmp_path_factory.mktemp("logs") / "vllm.log", timeout=400,
    )  # fmt: skip


@pytest.fixture(scope="module")
def speculating(launch: Launch, known: KnownAnswer) -> Iterator[ServerEndpoint]:
    with serve(launch, known.drafter_dir, SPECULATION) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def plain(launch: Launch) -> Iterator[ServerEndpoint]:
    with serve(replace(launch, log=launch.log.with_name("plain.log")), None, None) as endpoint:
        yield endpoint


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


def test_nothing_asked(speculating: ServerEndpoint) -> None:
    assert list(speculating.complete([], 4)) == []


def test_top2_gaps_are_the_targets(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    from transformers import LlamaForCausalLM

    (done,) = speculating.complete([Request("gaps", PROMPT, 30, ignore_eos=True, top2_gaps=True)], 1)
    assert done.token_ids == known.output(PROMPT, 30, ignore_eos=True)
    model = LlamaForCausalLM.from_pretrained(known.target_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *done.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    assert done.top2_gaps is not None
    assert done.top2_gaps == pytest.approx((first - second).tolist(), abs=1e-3)
    assert len({round(gap, 2) for gap in done.top2_gaps}) > 25  # or a shift by one would not be seen


def test_what_the_server_refuses(speculating: ServerEndpoint, known: KnownAnswer) -> None:
    with pytest.raises(EagleError, match=r"request big: the server refuses it \(400\): .*out of vocabulary"):
        list(speculating.complete([Request("ok", PROMPT, 9), Request("big", (VOCAB,), 9)], 2))
    with pytest.raises(EagleError, match=r"request long: the server refuses it \(400\): .*max_model_len=512"):
        list(speculating.complete([Request("long", PROMPT, LENGTH + 1)], 1))
    with pytest.raises(EagleError, match=r"request hot has temperature 0\.7: vLLM 0\.32\.\d+ loses the temperature"):
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
    deadline = time.monotonic() + SETTLE_SECONDS
    while _running(speculating) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _running(speculating) == 0
    after = speculating.totals()
    assert after is not None
    whole = known.counters(long.prompt_ids, long.max_tokens, long.ignore_eos)
    assert (after - before).verify_steps < whole.verify_steps


def test_attached(speculating: ServerEndpoint, launch: Launch, known: KnownAnswer) -> None:
    url = speculating.server.url
    with attach(url, launch.target, known.drafter_dir, SPECULATION) as attached:
        assert attached.per_request_counters
        before = attached.totals()
        attached.flush_prefix_cache()
        completions = list(attached.complete(REQUESTS[:6], 3))
        _check(completions, REQUESTS, known)
        counted = [c.counters for c in completions if c.counters is not None]
        assert _settled(attached, before, total(counted)) == total(counted)
    speculating.server.check()  # still runs
    with pytest.raises(EagleError, match="speculates with num_speculative_tokens=3, but num_speculative_tokens=4 was"):
        attach(url, launch.target, known.drafter_dir, Speculation.chain(4))
    with pytest.raises(EagleError, match="but no speculative tokens was asked for"):
        attach(url, launch.target, None, None)


def test_what_differs_from_what_was_asked(
    speculating: ServerEndpoint, launch: Launch, known: KnownAnswer, tmp_path: Path
) -> None:
    """The log of the real server, compared with what it was not asked."""
    logged = vllm_log.read(launch.log.read_text(encoding="utf-8"))
    assert logged == vllm_log.Logged(
        launch.interpreter.version, "v1", frozenset({"CPU_ATTN"}), "float32", None, 1, "auto", ("eagle3", K), (3, 5, 8)
    )
    assert differences(launch, logged, known.drafter_dir, SPECULATION) == []
    late = next(v for v in variants(known, tmp_path) if v.name == "all_late")
    assert differences(launch, logged, late.drafter_dir, SPECULATION) == [
        "boundaries fed to the drafter: asked (4, 6, 9), serves with (3, 5, 8)"
    ]
    other = replace(
        launch, runner="v2", attention="CPU_MLA", quantization="fp8", arguments={**launch.arguments, "dtype": "float16"}
    )
    assert differences(other, logged, None, None) == [
        "backend.runner: asked v2, serves with v1",
        "dtype: asked float16, serves with float32",
        "quantization: asked fp8, serves with None",
        "attention: asked ['CPU_MLA'], serves with ['CPU_ATTN']",
        "speculation (method, num_speculative_tokens): asked None, serves with ('eagle3', 3)",
    ]


def test_both_sides_alike(speculating: ServerEndpoint, plain: ServerEndpoint, known: KnownAnswer) -> None:
    sizes = (
        "num_gpu_blocks",
        "block_size",
        "enable_prefix_caching",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
    )
    with_drafter, without = (cache_config(e.get("/metrics")) for e in (speculating, plain))
    assert [with_drafter[name] for name in sizes] == [without[name] for name in sizes]
    # 8 sequences of 512 tokens are 4 blocks of 128 each; a fifth for drafts, and the one that vLLM keeps.
    assert with_drafter["num_gpu_blocks"] == "41"
    assert plain.totals() is None
    completions = list(plain.complete(REQUESTS, 8))
    _check(completions, REQUESTS, known)
    assert {c.counters for c in completions} == {None}


def test_sampling_without_a_drafter(plain: ServerEndpoint, known: KnownAnswer) -> None:
    """The second best token is e^26 times less likely, so that every sample is the known text."""
    asked = [Request("warm", PROMPT, 12, temperature=1.0, top_p=0.9, seed=7)]
    assert [c.token_ids for c in plain.complete(asked, 1)] == [known.output(PROMPT, 12)]


def test_a_killed_server(plain: ServerEndpoint, launch: Launch) -> None:
    """Last of its server: nothing of it is left, and the error says where to look."""
    assert plain.server.child is not None
    _check_death(plain, plain.server.child.pid, "was ended by SIGKILL", launch.log.with_name("plain.log"))


def test_a_killed_worker(speculating: ServerEndpoint, launch: Launch) -> None:
    """Last of its server. The worker is what runs out of memory; the server ends because of it."""
    assert speculating.server.child is not None
    workers = [
        pid
        for pid in speculating.server.child.processes()
        if b"VLLM::Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    _check_death(speculating, workers[0], "exited with code|was ended by", launch.log)


def test_a_server_that_cannot_start(launch: Launch, tmp_path: Path) -> None:
    wrong = replace(launch, arguments={**launch.arguments, "no_such_argument": 1}, log=tmp_path / "wrong.log")
    with pytest.raises(EngineDied, match=r"(?s)exited with code 2.*unrecognized arguments: --no-such-argument"):
        serve(wrong, None, None)


def test_command_line(launch: Launch, known: KnownAnswer) -> None:
    words = argv(launch, 1234, known.drafter_dir, SPECULATION)
    assert words[1].endswith("engine_server.py")
    assert words[2:7] == ["vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "1234"]
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(known.drafter_dir), "num_speculative_tokens": K}
    older = replace(launch, interpreter=replace(launch.interpreter, version="0.26.0"))
    assert "--per-request-spec-decode-metrics" in words
    assert "--per-request-spec-decode-metrics" not in argv(older, 1234, known.drafter_dir, SPECULATION)
    assert "--speculative-config" not in argv(launch, 1234, None, None)
    with pytest.raises(EagleError, match=r"engine_args: port, stream_interval cannot be set there"):
        argv(replace(launch, arguments={**launch.arguments, "port": 1, "stream_interval": 1}), 1234, None, None)
    with pytest.raises(ValueError, match="arguments lack max_num_seqs"):
        replace(launch, arguments={k: v for k, v in launch.arguments.items() if k != "max_num_seqs"})


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
    """The totals' difference; vLLM counts a step after it has sent it."""
    deadline = time.monotonic() + SETTLE_SECONDS
    assert before is not None
    while True:
        after = endpoint.totals()
        assert after is not None
        if after - before == wanted or time.monotonic() > deadline:
            return after - before
        time.sleep(0.05)


def _running(endpoint: ServerEndpoint) -> float:
    return sum(s.value for s in samples(endpoint.get("/metrics")) if s.name == "vllm:num_requests_running")


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
        endpoint.totals()
    endpoint.close()
    assert child.processes() == []
    assert not taken(int(url.rpartition(":")[2]))
