"""The figures of a cell, from files that were written by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from eagle3x.benchmark.cell import summarise
from eagle3x.benchmark.records import Batch, RequestRecord, append_batch, append_lines
from eagle3x.config import Config
from eagle3x.types import Completion, Finish, SpecCounters, Timing

LOOP = (8, *([5, 6] * 8))


def counters(verify: int, *accepted: int) -> SpecCounters:
    return SpecCounters(verify, verify * len(accepted), accepted)


SERVED = {
    "math-0": counters(10, 5, 2),
    "math-1": counters(20, 6, 0),
    "code-0": counters(10, 10, 10),
    "code-1": counters(10, 1, 0),
}
OUTPUTS: dict[str, tuple[int, ...]] = {"math-0": (1, 2, 3), "math-1": (4, 5, 6), "code-0": LOOP, "code-1": (7, 8, 2)}


@dataclass(frozen=True)
class Settings:
    resamples: int = 500
    confidence: float = 0.95
    near_tie: float = 1e-4


@dataclass(frozen=True)
class Slice:
    benchmark: Settings = Settings()
    seed: int = 1


CFG = cast(Config, Slice())


def record(
    name: str, tokens: tuple[int, ...], counted: SpecCounters | None, times: tuple[float, float, float],
    gaps: tuple[float, ...] | None = None,
) -> RequestRecord:  # fmt: skip
    finish: Finish = "stop" if tokens[-1] == 2 else "length"
    return RequestRecord(name.split("-")[0], 4, Completion(name, tokens, finish, Timing(*times), counted, 0, gaps))


def leg(number: int, drafter: bool, seconds: dict[str, float]) -> Batch:
    """Every request takes 1 s to its first token, then `seconds` to its last of 11 tokens."""
    rows = tuple(record(n, tuple(range(11)), None, (0, 1, 1 + s)) for n, s in seconds.items())
    return Batch(number, drafter, 1, 100.0, counters(10, 5, 0) if drafter else None, rows)


def write(folder: Path, timing: bool = True, exact: bool = True, **replayed: SpecCounters) -> dict[str, Any]:
    rows = [record(n, OUTPUTS[n], c, (0, 1, 2), (0.5,) * len(OUTPUTS[n])) for n, c in SERVED.items()]
    append_batch(folder / "acceptance.jsonl", Batch(0, True, 8, 1.0, None, tuple(rows)))
    changed = {**OUTPUTS, "math-1": (4, 9, 6)}
    plain = [record(n, changed[n], None, (0, 1, 2), (1.0, 5e-5, 1.0)) for n in SERVED]
    append_batch(folder / "baseline.jsonl", Batch(0, False, 8, 1.0, None, tuple(plain)))
    if timing:
        # Sums: baseline 30 + 10 = 40 and 20 + 20 = 40 seconds of decoding, drafter 10 + 10 and 10 + 20.
        append_batch(folder / "timing.jsonl", leg(0, False, {"math-0": 30, "code-0": 20}))
        append_batch(folder / "timing.jsonl", leg(1, True, {"math-0": 10, "code-0": 10}))
        append_batch(folder / "timing.jsonl", leg(2, True, {"math-0": 10, "code-0": 20}))
        append_batch(folder / "timing.jsonl", leg(3, False, {"math-0": 10, "code-0": 20}))
    predicted = {**SERVED, **{n.replace("_", "-"): c for n, c in replayed.items()}}
    append_lines(
        folder / "replay.jsonl",
        [
            {"id": n, **asdict(c), "draft_gap": 0.25, "others": {"b-1": asdict(counters(20, 2, 0))}}
            for n, c in predicted.items()
        ],
    )
    context = {
        "num_speculative_tokens": 2, "topk": 1, "drafts": 2, "num_blocks": 6,
        "engine": {"engine": "transformers"}, "exact": exact,
        "trained": [1, 3, 4], "predicted": [1, 3, 4], "mismatched": False,
        "candidates": {"b": [1, 3, 4], "b-1": [0, 2, 3]},
        "sampled": [],
    }  # fmt: skip
    (folder / "context.json").write_text(json.dumps(context))
    return summarise(folder, CFG)


def test_acceptance_figures(tmp_path: Path) -> None:
    cell = write(tmp_path)
    # A = 7 + 6 + 20 + 1 = 34, V = 50.
    assert cell["tau"]["value"] == pytest.approx(1 + 34 / 50)
    assert cell["tau"]["low"] < cell["tau"]["value"] < cell["tau"]["high"]
    assert cell["macro"] == pytest.approx((1.7 + 1.3 + 3 + 1.1) / 4)
    assert [s["value"] for s in cell["survival"]] == pytest.approx([22 / 50, 12 / 50])
    assert [a["value"] for a in cell["alpha"]] == pytest.approx([22 / 50, 12 / 22])
    # Accepted at 2, given 1, is 2/5, 0/6, 10/10 and 0/1: no resample leaves 0 to 1, and some reach it.
    assert (cell["alpha"][1]["low"], cell["alpha"][1]["high"]) == pytest.approx((0, 1))
    assert cell["slot_use"] == pytest.approx(1.68 / 3)
    assert cell["draft_efficiency"] == pytest.approx(34 / 100)
    assert (cell["requests"], cell["output_tokens"]) == (4, 9 + 17)
    assert {n: i["value"] for n, i in cell["per_category"].items()} == pytest.approx(
        {"code": 1 + 21 / 20, "math": 1 + 13 / 30}
    )


def test_degenerate_tails_are_left_out_of_the_second_figure(tmp_path: Path) -> None:
    cell = write(tmp_path)
    assert cell["degenerate_requests"] == 1
    assert cell["degenerate_tails"] == {"code-0": 1}
    assert cell["tau_without_degenerate"]["value"] == pytest.approx(1 + 14 / 40)


def test_the_stop_token_does_not_hide_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUTPUTS, "code-1", (*LOOP, 2))
    assert write(tmp_path)["degenerate_requests"] == 2


def test_outputs_that_part_are_listed(tmp_path: Path) -> None:
    same = write(tmp_path)["identical_outputs"]
    assert (same["rate"], same["lossy"]) == (0.75, 0)
    assert same["differences"] == [
        {"id": "math-1", "position": 1, "baseline_token": 9, "drafter_token": 5, "top2_gap": 5e-5, "near_tie": True,
         "lossy": False}
    ]  # fmt: skip


def test_speed_up_pairs_prompts_over_all_legs(tmp_path: Path) -> None:
    (found,) = write(tmp_path)["speedup"].values()
    assert found["decode"]["value"] == pytest.approx(80 / 50)
    assert found["end_to_end"]["value"] == pytest.approx(84 / 54)
    # Per request 40/20 and 40/30: no resample of the two leaves this range.
    assert 40 / 30 - 1e-9 <= found["decode"]["low"] <= found["decode"]["high"] <= 2 + 1e-9
    assert found["tau"] == pytest.approx(1.5)
    rates = found["rates"]["baseline"]
    assert (rates["decode_per_request"]["value"], rates["end_to_end"]["value"]) == pytest.approx((40 / 80, 44 / 200))
    # Both prompts decode 20 tokens in 40 s; end to end 22 of 42 s each, so that each has half of the engine's 200 s.
    assert (rates["decode_per_request"]["low"], rates["end_to_end"]["high"]) == pytest.approx((0.5, 0.22))


def test_without_a_timing_pass_there_is_no_speed_up(tmp_path: Path) -> None:
    assert write(tmp_path, timing=False)["speedup"] is None


def test_replay_that_agrees(tmp_path: Path) -> None:
    replay = write(tmp_path)["replay"]
    assert (replay["requests"], replay["identical_counters"], replay["verdict"]) == (4, 4, "agree")
    assert replay["differences"] == []
    assert replay["tau"]["value"] == pytest.approx(1.68)
    assert replay["paired_diff"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert replay["candidates"]["b-1"]["boundaries"] == [0, 2, 3]
    assert replay["candidates"]["b-1"]["value"] == pytest.approx(1.1)


def test_replay_that_differs_is_listed_with_its_gaps(tmp_path: Path) -> None:
    replay = write(tmp_path, math_0=counters(11, 5, 1))["replay"]
    assert (replay["identical_counters"], replay["verdict"]) == (3, "differ")
    assert replay["differences"] == [
        {"id": "math-0", "served": [10, 5, 2], "replayed": [11, 5, 1], "draft_gap": 0.25, "target_gap": 0.5}
    ]
    # A 34 of V 50 served, A 33 of V 51 replayed.
    assert replay["paired_diff"]["value"] == pytest.approx(34 / 50 - 33 / 51)


def test_acceptance_at_other_temperatures(tmp_path: Path) -> None:
    write(tmp_path)
    rows = [record(n, OUTPUTS[n], counters(10, 2, 1), (0, 1, 2)) for n in SERVED]
    append_batch(tmp_path / "acceptance_t1.5.jsonl", Batch(0, True, 8, 1.0, None, tuple(rows)))
    context = json.loads((tmp_path / "context.json").read_text())
    (tmp_path / "context.json").write_text(json.dumps(context | {"sampled": [{"temperature": 1.5, "top_p": 0.9}]}))
    (sampled,) = summarise(tmp_path, CFG)["sampled"]
    assert (sampled["temperature"], sampled["top_p"], sampled["requests"]) == (1.5, 0.9, 4)
    assert sampled["tau"] == pytest.approx({"value": 1.3, "low": 1.3, "high": 1.3})
    assert [s["value"] for s in sampled["survival"]] == pytest.approx([0.2, 0.1])


def test_a_tree_is_not_replayed(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "replay.jsonl").unlink()
    context = json.loads((tmp_path / "context.json").read_text())
    context |= {"topk": 2, "drafts": 4, "candidates": {}}
    (tmp_path / "context.json").write_text(json.dumps(context))
    cell = summarise(tmp_path, CFG)
    assert (cell["replay"], cell["boundaries"]["serve_probe"]) == (None, None)
    assert (cell["topk"], cell["drafts"], cell["tau"]["value"]) == (2, 4, pytest.approx(1 + 34 / 50))


def test_in_bfloat16_four_requests_tell_nothing(tmp_path: Path) -> None:
    replayed = {"math_0": counters(11, 5, 1), "code_1": counters(9, 2, 0)}
    replay = write(tmp_path, exact=False, **replayed)["replay"]
    assert replay["verdict"] == "cannot tell"
    assert replay["prompts_needed"] > 4


def test_a_category_of_one_prompt_has_the_widest_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SERVED, "code-1")
    assert write(tmp_path)["per_category"]["code"] == {"value": 3.0, "low": 1.0, "high": 3.0}


def test_the_figures_are_json_and_come_out_the_same_again(tmp_path: Path) -> None:
    cell = write(tmp_path)
    assert json.loads(json.dumps(cell, allow_nan=False)) == json.loads(json.dumps(summarise(tmp_path, CFG)))
