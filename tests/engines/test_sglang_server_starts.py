"""SGLang servers that one test each starts: wrong slots of the known-answer pair, a tree, a wrong argument."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sglang_pair import CHAIN, TREE, K, check, launch_of, scaled_pair, settled

from eagle3x.diagnosis.known_answer import START, KnownAnswer, variants
from eagle3x.engines.child import EngineDied
from eagle3x.engines.server import Server
from eagle3x.engines.sglang_attach import attach, reported
from eagle3x.engines.sglang_serve import Launch, argv, serve
from eagle3x.types import Request, SpecCounters, total

pytestmark = pytest.mark.usefixtures("no_other_engine")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> KnownAnswer:
    return scaled_pair(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def launch(known: KnownAnswer, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch_of(known, tmp_path_factory.mktemp("logs") / "sglang.log")


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
        check(completions, asked, known)
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
            check(completions, asked, known)
            # The drafter's best path is in every tree, so it accepts what a chain does; it drafts twice as much.
            chain = [known.counters(r.prompt_ids, r.max_tokens, r.ignore_eos) for r in asked]
            wanted = [replace(c, drafted=c.verify_steps * 6) for c in chain]
            assert [c.counters for c in completions] == wanted
            assert settled(endpoint, before, total(wanted)) == total(wanted)
            # The first request of a pass finds nothing; the next ones what they share with it.
            assert completions[0].cached_tokens == 0
            assert all(0 < (c.cached_tokens or 0) <= len(prompt) for c in completions[1:])
        assert "prefix_cache=True" in repr(reported(started.url))


def test_a_server_that_cannot_start(launch: Launch, tmp_path: Path) -> None:
    wrong = replace(launch, arguments={**launch.arguments, "no_such_argument": 1}, log=tmp_path / "wrong.log")
    with pytest.raises(EngineDied, match=r"(?s)exited with code 2.*unrecognized arguments: --no-such-argument"):
        serve(wrong, None, None)
