"""A drafter that is sometimes right, served by the real SGLang on a CPU: texts and counters are those of transformers.

The known-answer pair's attention writes nothing; this target's and this drafter's do, so positions, masks and caches of
drafting and verifying are in every figure. Two servers are started at the same time, with a chain and with a tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3x.benchmark.config import Speculation
from eagle3x.capture import exported_keys
from eagle3x.config import Hardware
from eagle3x.engines import adapter, interpreter
from eagle3x.engines.base import Engine
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.engines.sglang_arguments import arguments, environment
from eagle3x.engines.sglang_serve import Launch, serve
from eagle3x.targets import Target
from eagle3x.types import Completion, Request, TokenSample, total

pytestmark = pytest.mark.usefixtures("no_other_engine")

CPU = Hardware(device="cpu", threads=1, devices=None)
BOUNDARIES = (1, 3, 5)
LONGEST = 128
CHAIN, TREE = Speculation.chain(3), Speculation(num_speculative_tokens=3, topk=3, num_draft_tokens=12)
LENGTHS = (3, 17, 9, 1, 40, 18, 5, 29, 2, 11, 33, 7)


def slot(name: Any) -> Slot:
    backend = Backend(
        name=name, runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=6,
        engine_args={}, python=None, url=None, port=None, memory_fraction=0.3, start_timeout=400.0,
    )  # fmt: skip
    return Slot("serve", backend, Quantization("none"), Attention("auto"))


def requests() -> list[Request]:
    found = []
    for i, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(100 + i)
        ids = tuple(torch.randint(3, 128, (length,), generator=generator).tolist())
        found.append(Request(f"r{i}", ids, 30 + 3 * i, ignore_eos=i % 3 > 0))
    return found


@pytest.fixture(scope="module")
def reference(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    job = Job(LONGEST, tmp_path_factory.mktemp("logs"))
    with adapter("transformers").open(slot("transformers"), tiny_target, CPU, job) as opened:
        yield opened


@pytest.fixture(scope="module")
def drafter(tiny_target: Target, reference: Engine, fit_drafter: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted to the greedy text of half of `requests`, with keys that make both engines feed `BOUNDARIES`."""
    half = requests()[::2]
    texts = {c.id: c.token_ids for c in reference.generate(half)}
    states = list(reference.capture([TokenSample(r.id, r.prompt_ids + texts[r.id]) for r in half], BOUNDARIES))
    kept = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:100].sort().values
    directory = fit_drafter(tiny_target, states, BOUNDARIES, kept, 60, tmp_path_factory.mktemp("drafter") / "d")
    file = directory / "config.json"
    keys = exported_keys(BOUNDARIES, tiny_target.num_blocks, tiny_target.model_class).config()
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return directory


@pytest.fixture(scope="module")
def expected(reference: Engine, drafter: Path) -> dict[str, Completion]:
    with reference.serve(drafter, CHAIN) as endpoint:
        return {c.id: c for c in endpoint.complete(requests(), 6)}


@pytest.fixture(scope="module")
def served(
    tiny_target: Target, drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerEndpoint]]:
    logs = tmp_path_factory.mktemp("logs")

    def start(name: str, speculation: Speculation) -> ServerEndpoint:
        given = arguments(slot("sglang"), tiny_target, CPU, "intel_amx", LONGEST)
        launch = Launch(
            interpreter.find("sglang", None, "cpu"), tiny_target, given, environment(slot("sglang"), CPU), "cpu",
            "intel_amx", None, logs / f"{name}.log", 400,
        )  # fmt: skip
        return serve(launch, drafter, speculation)

    with ThreadPoolExecutor(2) as threads:
        starting = {n: threads.submit(start, n, s) for n, s in (("chain", CHAIN), ("tree", TREE))}
    endpoints = [future.result() for future in starting.values() if future.exception() is None]
    try:
        yield {name: future.result() for name, future in starting.items()}
    finally:
        for endpoint in endpoints:
            endpoint.close()


@pytest.mark.parametrize("concurrency", [1, 6])
def test_a_chain_accepts_what_transformers_accepts(
    concurrency: int, served: dict[str, ServerEndpoint], expected: dict[str, Completion]
) -> None:
    done = {c.id: c for c in served["chain"].complete(requests(), concurrency)}
    for request in requests():
        found, wanted = done[request.id], expected[request.id]
        assert (found.token_ids, found.finish) == (wanted.token_ids, wanted.finish)
        assert found.counters == wanted.counters
    counted = total([c.counters for c in done.values() if c.counters is not None])
    assert 0 < counted.accepted_at[2] < counted.accepted_at[0] < counted.verify_steps  # right ones and wrong ones


@pytest.mark.parametrize("concurrency", [1, 6])
def test_a_tree_writes_the_same_and_accepts_more(
    concurrency: int, served: dict[str, ServerEndpoint], expected: dict[str, Completion]
) -> None:
    """A tree of 11 drafts need not hold the chain of 3, but of a drafter that is often nearly right it does more."""
    done = {c.id: c for c in served["tree"].complete(requests(), concurrency)}
    for request in requests():
        found, wanted = done[request.id], expected[request.id]
        assert (found.token_ids, found.finish) == (wanted.token_ids, wanted.finish)
    tree, chain = (total([c.counters for c in d.values() if c.counters is not None]) for d in (done, expected))
    assert tree.drafted == 11 * tree.verify_steps
    assert tree.verify_steps < chain.verify_steps
    assert tree.accepted / tree.verify_steps > chain.accepted / chain.verify_steps
