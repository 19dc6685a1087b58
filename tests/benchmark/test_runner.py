"""The runner's own logic, against an endpoint that answers by a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from eagle3x.benchmark import runner
from eagle3x.benchmark.records import read_batches, requests
from eagle3x.benchmark.runner import InvalidCellError, Workload, acceptance_pass, timing_legs, timing_pass
from eagle3x.types import Completion, EagleError, Request, SpecCounters, Timing

K = 3
PER_REQUEST = SpecCounters(2, 6, (1, 1, 0))
"""What the script accepts for each request: V + A = 4, so 5 output tokens (the prefill yields the first)."""
TOKENS = 5


@dataclass
class Scripted:
    """Answers every request with `TOKENS` tokens. `log`: what was done to it, in order."""

    drafter: bool
    log: list[str]
    per_request_counters: bool = True
    counts_past_stop: bool = True
    foreign: SpecCounters | None = None
    """Counted by someone else while our first request runs."""
    late: int = 0
    """So many readings of the totals still miss the last request."""
    lost: bool = False
    """The last request is never counted."""
    cached: dict[str, int] = field(default_factory=dict)
    concurrencies: list[int] = field(default_factory=list)
    die_after: int | None = None
    tokens: int = TOKENS
    _totals: SpecCounters = field(default_factory=lambda: SpecCounters(100, 300, (50, 20, 10)))
    _pending: SpecCounters | None = None
    _readings: int = 0

    def complete(self, requests: Sequence[Request], concurrency: int) -> Iterator[Completion]:
        self.concurrencies.append(concurrency)
        self.log.append("complete " + ",".join(r.id for r in requests))
        for clock, request in enumerate(reversed(requests)):
            if self.die_after is not None:
                if self.die_after == 0:
                    raise KeyboardInterrupt
                self.die_after -= 1
            if self.drafter:
                self._settle()
                self._pending, self._readings = PER_REQUEST, 0
            if self.foreign is not None:
                self._totals, self.foreign = self._totals + self.foreign, None
            counters = PER_REQUEST if self.drafter and self.per_request_counters else None
            cached = self.cached.get(request.id, 0)
            timing = Timing(clock, clock + 0.25, clock + 1.25)
            yield Completion(request.id, tuple(range(self.tokens)), "length", timing, counters, cached)

    def _settle(self) -> None:
        if self._pending is not None:
            self._totals, self._pending = self._totals + self._pending, None

    def totals(self) -> SpecCounters | None:
        if not self.drafter:
            return None
        self._readings += 1
        if self._readings > self.late and not self.lost:
            self._settle()
        return self._totals

    def flush_prefix_cache(self) -> None:
        self.log.append("flush")

    def __enter__(self) -> Self:
        self.log.append("open drafter" if self.drafter else "open baseline")
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("close drafter" if self.drafter else "close baseline")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SETTLE_SECONDS", 0.001)
    monkeypatch.setattr(runner, "SETTLE_TIMEOUT", 0.05)


def workload(n: int, warmup: int = 0, ignore_eos: bool = False) -> Workload:
    asked = tuple(Request(f"r{i}", (1, 2, 10 + i), TOKENS, ignore_eos=ignore_eos) for i in range(n))
    return Workload(asked, {r.id: "code" if i % 2 else "math" for i, r in enumerate(asked)}, warmup)


def accept(endpoint: Scripted, work: Workload, file: Path, concurrency: int = 2) -> list[Any]:
    return acceptance_pass(lambda: endpoint, work, concurrency, K if endpoint.drafter else None, file, "acceptance")


def test_counters_of_every_request_are_stored(tmp_path: Path) -> None:
    file = tmp_path / "acceptance.jsonl"
    accept(Scripted(True, []), workload(3), file)
    records = requests(read_batches(file))
    assert [r.id for r in records] == ["r0", "r1", "r2"]
    assert [r.completion.counters for r in records] == [PER_REQUEST] * 3
    assert [r.category for r in records] == ["math", "code", "math"]
    assert records[0].prompt_tokens == 3
    assert (records[0].decode_seconds, records[0].end_to_end_seconds) == (1.0, 1.25)


def test_an_engine_with_totals_only_is_measured_one_request_at_a_time(tmp_path: Path) -> None:
    endpoint = Scripted(True, [], per_request_counters=False)
    batches = accept(endpoint, workload(3), tmp_path / "a", concurrency=8)
    assert endpoint.concurrencies == [1, 1, 1]
    assert [r.completion.counters for r in requests(batches)] == [PER_REQUEST] * 3


@pytest.mark.parametrize("per_request", [True, False])
def test_totals_that_lag_behind_are_waited_for(tmp_path: Path, per_request: bool) -> None:
    endpoint = Scripted(True, [], per_request_counters=per_request, late=3)
    batches = accept(endpoint, workload(2), tmp_path / "a")
    assert sum(b.totals.verify_steps for b in batches) == 4


def test_totals_are_read_until_they_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine adds up its counters one after the other: the first reading already explains the output.
    before, half, whole = (SpecCounters(9, 27, (3, 2, 1)) + c for c in (SpecCounters(0, 0, (0, 0, 0)),
                           SpecCounters(2, 6, (1, 1, 0)), SpecCounters(2, 6, (2, 2, 1))))  # fmt: skip
    readings = iter([before, before, half, whole, whole, whole])
    monkeypatch.setattr(Scripted, "totals", lambda self: next(readings))
    (batch,) = accept(Scripted(True, [], per_request_counters=False), workload(1), tmp_path / "a")
    assert batch.totals == SpecCounters(2, 6, (2, 2, 1))


@pytest.mark.parametrize("per_request", [True, False])
def test_counters_that_never_come_are_an_error(tmp_path: Path, per_request: bool) -> None:
    endpoint = Scripted(True, [], per_request_counters=per_request, lost=True)
    with pytest.raises(InvalidCellError, match="do not count every step"):
        accept(endpoint, workload(1), tmp_path / "a")


@pytest.mark.parametrize("per_request", [True, False])
def test_a_foreign_request_makes_the_cell_invalid(tmp_path: Path, per_request: bool) -> None:
    file = tmp_path / "a"
    # Four more tokens in totals: 4 + 4 is more than the 4 to 7 that a request of 5 tokens explains.
    endpoint = Scripted(True, [], per_request_counters=per_request, foreign=SpecCounters(3, 9, (1, 0, 0)))
    with pytest.raises(InvalidCellError, match="someone else uses it"):
        accept(endpoint, workload(1), file)
    assert read_batches(file) == []


def test_a_single_foreign_verify_step_is_seen_where_requests_have_counters(tmp_path: Path) -> None:
    with pytest.raises(InvalidCellError, match="someone else"):
        accept(Scripted(True, [], foreign=SpecCounters(1, 3, (0, 0, 0))), workload(4), tmp_path / "a")


def test_a_server_without_speculation_is_not_measured_as_one(tmp_path: Path) -> None:
    silent = Scripted(False, [])
    with pytest.raises(EagleError, match="without speculation"):
        acceptance_pass(lambda: silent, workload(1), 1, K, tmp_path / "a", "acceptance")


def test_warm_up_comes_first_and_is_not_counted(tmp_path: Path) -> None:
    endpoint = Scripted(True, [])
    batches = accept(endpoint, workload(2, warmup=1), tmp_path / "a")
    assert endpoint.log == ["open drafter", "flush", "complete r0", "flush", "complete r0,r1", "close drafter"]
    assert [b.totals for b in batches] == [PER_REQUEST + PER_REQUEST]


def test_what_a_cold_prompt_finds_cached_is_an_error(tmp_path: Path) -> None:
    # All prompts share two tokens of three, so two may be cached by an earlier request of this pass.
    accept(Scripted(True, [], cached={"r1": 2}), workload(2), tmp_path / "a")
    with pytest.raises(InvalidCellError, match=r"r1 found 3 .* 2 at most"):
        accept(Scripted(True, [], cached={"r1": 3}), workload(2), tmp_path / "b")


def test_a_killed_pass_goes_on_after_its_last_batch(tmp_path: Path) -> None:
    file = tmp_path / "a"
    work = workload(20)
    killed = Scripted(True, [], die_after=13)
    with pytest.raises(KeyboardInterrupt):
        accept(killed, work, file)
    # 2 slots x 4 requests are a batch: one is complete.
    assert len(requests(read_batches(file))) == 8
    again = Scripted(True, [])
    accept(again, work, file)
    assert again.log[2] == "complete " + ",".join(f"r{i}" for i in range(8, 16))
    assert [r.id for r in requests(read_batches(file))] == [f"r{i}" for i in range(20)]
    assert [b.number for b in read_batches(file)] == [0, 1, 2]


def test_a_finished_pass_opens_no_engine(tmp_path: Path) -> None:
    accept(Scripted(True, []), workload(2), tmp_path / "a")
    idle = Scripted(True, [])
    assert len(requests(accept(idle, workload(2), tmp_path / "a"))) == 2
    assert idle.log == []


@pytest.mark.parametrize("cut", [1, 30, 400])
def test_a_torn_batch_is_dropped(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "a"
    accept(Scripted(True, []), workload(10), file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert len(requests(read_batches(file))) == 8
    accept(Scripted(True, []), workload(10), file)
    assert file.read_bytes().count(b"\n") == 10
    assert [r.id for r in requests(read_batches(file))] == [f"r{i}" for i in range(10)]


def test_abba_by_hand() -> None:
    legs = [(leg.drafter, leg.concurrency) for leg in timing_legs([1, 4], 1)]
    assert legs == [(False, 1), (False, 4), (True, 1), (True, 4), (True, 1), (True, 4), (False, 1), (False, 4)]
    assert [leg.drafter for leg in timing_legs([1], 2)] == [False, True, True, False] * 2
    assert [leg.number for leg in timing_legs([1, 4], 2)] == list(range(16))


def time_it(log: list[str], both: bool, file: Path, **script: Any) -> list[Any]:
    return timing_pass(
        lambda: Scripted(False, log, **script), lambda: Scripted(True, log, **script), both,
        workload(2, ignore_eos=True), timing_legs([1], 1), K, file, "timing",
    )  # fmt: skip


def test_both_sides_stay_open_where_they_fit(tmp_path: Path) -> None:
    log: list[str] = []
    batches = time_it(log, True, tmp_path / "t")
    assert [entry for entry in log if "open" in entry or "close" in entry] == [
        "open baseline", "open drafter", "close drafter", "close baseline",
    ]  # fmt: skip
    assert [b.drafter for b in batches] == [False, True, True, False]
    assert [b.totals for b in batches] == [None, PER_REQUEST + PER_REQUEST, PER_REQUEST + PER_REQUEST, None]


def test_sides_that_do_not_fit_together_take_turns(tmp_path: Path) -> None:
    log: list[str] = []
    time_it(log, False, tmp_path / "t")
    assert [entry for entry in log if "open" in entry or "close" in entry] == [
        "open baseline", "close baseline", "open drafter", "close drafter", "open baseline", "close baseline",
    ]  # fmt: skip


def test_every_leg_starts_with_a_flushed_cache(tmp_path: Path) -> None:
    log: list[str] = []
    time_it(log, True, tmp_path / "t")
    work = [entry for entry in log if "open" not in entry and "close" not in entry]
    assert work == ["flush", "complete r0,r1"] * 4


def test_a_killed_timing_pass_redoes_no_leg(tmp_path: Path) -> None:
    file = tmp_path / "t"
    time_it([], True, file)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:5]))  # two legs of two requests, and half a leg
    log: list[str] = []
    batches = time_it(log, True, file)
    assert log.count("complete r0,r1") == 2
    assert [b.number for b in batches] == [0, 1, 2, 3]


def test_an_answer_of_another_length_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"has 4 tokens, not 5.*ignore_eos"):
        time_it([], True, tmp_path / "t", tokens=4)


def test_timing_needs_fixed_lengths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fixed length"):
        timing_pass(lambda: Scripted(False, []), lambda: Scripted(True, []), True, workload(2), timing_legs([1], 1), K,
                    tmp_path / "t", "timing")  # fmt: skip
