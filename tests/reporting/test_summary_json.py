from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3x.reporting import report
from eagle3x.types import EagleError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_hand(cell: Any, file: str) -> list[dict[str, Any]]:
    records = lines(cell.benchmark_dir / file)
    return [r.get("counters", r) for r in records]


def tau(counters: list[dict[str, Any]]) -> float:
    return 1 + sum(sum(c["accepted_at"]) for c in counters) / sum(c["verify_steps"] for c in counters)


def test_one_cell(make_cell: Any, tmp_path: Path) -> None:
    cell = make_cell("capture=as_is", overrides=("capture=as_is",), reused=("prompts",), differing=1)
    report.write_report(tmp_path, [cell], "python -m eagle3x capture=as_is")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["schema_version"] == 1
    assert summary["command"] == "python -m eagle3x capture=as_is"
    assert summary["comparisons"] == []
    (found,) = summary["cells"]
    served, replayed = by_hand(cell, "acceptance.jsonl"), by_hand(cell, "replay.jsonl")
    assert found["name"] == "capture=as_is"
    assert (found["status"], found["error"]) == ("ok", None)
    assert found["overrides"] == ["capture=as_is"]
    assert found["tau"]["value"] == pytest.approx(tau(served))
    assert found["tau"]["low"] < found["tau"]["value"] < found["tau"]["high"]
    assert found["tau_without_degenerate"]["value"] == pytest.approx(tau(served[:3] + served[4:]))
    assert found["degenerate_requests"] == 1
    assert found["tau_replay"]["value"] == pytest.approx(tau(replayed))
    steps = sum(c["verify_steps"] for c in served)
    assert [s["value"] for s in found["survival"]] == pytest.approx(
        [sum(c["accepted_at"][i] for c in served) / steps for i in range(3)]
    )
    assert found["slot_use"] == pytest.approx(tau(served) / 4)
    assert found["replay"]["requests"] == 48
    assert found["replay"]["identical_counters"] == 47
    assert found["replay"]["paired_diff"]["value"] == pytest.approx(tau(served) - tau(replayed))
    assert found["replay"]["verdict"] == "differ"
    assert len(found["replay"]["differences"]) == 1
    assert found["identical_outputs"]["rate"] == pytest.approx(47 / 48)
    assert found["identical_outputs"]["differences"][0]["position"] == 21
    assert found["boundaries"]["trained"] == [2, 14, 26]
    assert found["boundaries"]["capture_probe"]["verdict"] == "matched"
    assert "serve_probe" in found["boundaries"]
    assert found["mismatched"] is False
    assert set(found["speedup"]) == {"1"}
    assert found["speedup"]["1"]["decode"]["value"] == pytest.approx(1 / 1.24, abs=0.03)
    assert found["stages"]["prompts"]["reused"] is True
    assert found["stages"]["drafter"] == {
        "wall_seconds": 118.0, "tokens": 15210, "key": "d0d00000000000000003", "reused": False
    }  # fmt: skip
    assert found["confounders"] == []


def test_a_matrix_is_compared_pair_by_pair(matrix: list[Any], tmp_path: Path) -> None:
    for i, cell in enumerate(matrix):
        report.write_report(tmp_path / str(i), [cell], "job")
    report.write_report(tmp_path, report.load_cells(tmp_path), "python -m eagle3x -m")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [c["mismatched"] for c in summary["cells"]] == [False, True, False, True]
    served = [tau(by_hand(c, "acceptance.jsonl")) for c in matrix]
    replayed = [tau(by_hand(c, "replay.jsonl")) for c in matrix]
    compared = [(p["cell"], p["baseline"], p["swept"]) for p in summary["comparisons"]]
    names = [c.name for c in matrix]
    assert compared == [
        (names[1], names[0], ["serve.capture"]),
        (names[2], names[0], ["backend"]),
        (names[3], names[1], ["backend"]),
        (names[3], names[2], ["serve.capture"]),
    ]
    for p in summary["comparisons"]:
        a, b = names.index(p["cell"]), names.index(p["baseline"])
        assert p["prompts"] == 48
        assert p["difference"]["value"] == pytest.approx(served[a] - served[b])
        assert p["replay_difference"]["value"] == pytest.approx(replayed[a] - replayed[b])
        assert p["p_holm"] >= p["p_value"]
    assert summary["comparisons"][0]["difference"]["high"] < 0
    assert summary["comparisons"][1]["confounders"] == [{"key": "serve.backend", "values": ["sglang", "vllm"]}]
    assert summary["cells"][2]["confounders"] == [{"key": "serve.backend", "values": ["sglang", "vllm"]}]
    assert summary["cells"][1]["confounders"] == []


def test_only_prompts_of_both_cells_are_compared(make_cell: Any) -> None:
    few = make_cell("benchmark.max_prompts=12", overrides=("benchmark.max_prompts=12",), prompts=12, alpha=0.3)
    many = make_cell("benchmark.max_prompts=48", overrides=("benchmark.max_prompts=48",), prompts=48)
    (pair,) = report.summarize([many, few], "x").comparisons
    assert pair.prompts == 12
    expected = tau(by_hand(few, "acceptance.jsonl")) - tau(by_hand(many, "acceptance.jsonl")[:12])
    assert pair.difference.value == pytest.approx(expected)


def test_a_failed_cell_keeps_its_error_and_the_others_their_figures(
    make_cell: Any, failed_cell: Any, tmp_path: Path
) -> None:
    good = make_cell("backend=vllm", overrides=("backend=vllm",))
    report.write_report(tmp_path, [good, failed_cell], "x")
    ok, failed = json.loads((tmp_path / "summary.json").read_text())["cells"]
    assert ok["status"] == "ok"
    assert failed["status"] == "failed"
    assert failed["error"] == failed_cell.error
    assert failed["tau"] is None
    assert failed["speedup"] is None
    assert set(failed) == set(ok)
    assert set(failed["stages"]) == {"prompts", "responses"}


def test_without_a_timing_pass_there_is_no_speedup(make_cell: Any, tmp_path: Path) -> None:
    report.write_report(tmp_path, [make_cell(timing=False)], "x")
    assert json.loads((tmp_path / "summary.json").read_text())["cells"][0]["speedup"] == {}
    assert "not measured" in (tmp_path / "report.md").read_text()


def test_a_benchmark_that_cannot_be_read_is_named(make_cell: Any) -> None:
    cell = make_cell("odd")
    (cell.benchmark_dir / "cell.json").write_text("{}")
    with pytest.raises(EagleError, match=r"cell odd.*cell\.json"):
        report.summarize([cell], "x")


def test_undefined_figures_never_become_nan(make_cell: Any) -> None:
    cell = make_cell()
    record = json.loads((cell.benchmark_dir / "cell.json").read_text())
    record["slot_use"] = float("nan")
    (cell.benchmark_dir / "cell.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="JSON"):
        report.summarize([cell], "x").dumps()


def test_credentials_are_in_no_file(make_cell: Any, tmp_path: Path) -> None:
    secret = "sesame-open"
    cell = make_cell(overrides=(f"serve.backend.engine_args.api_key={secret}",))
    cell = replace(cell, name=cell.overrides[0])
    cell.config["serve"]["backend"]["engine_args"] = {"api_key": secret}
    report.write_report(tmp_path / "run", [cell], f"python -m eagle3x serve.backend.engine_args.api_key={secret}")
    written = list((tmp_path / "run").iterdir())
    assert len(written) == 4
    assert [f.name for f in written if secret in f.read_text()] == []


def test_every_field_is_documented(matrix: list[Any]) -> None:
    documented = (Path(__file__).parents[2] / "docs" / "summary.md").read_text()
    summary = json.loads(report.summarize(matrix, "x").dumps())
    nested = (summary["cells"][0][n] for n in ("replay", "boundaries", "identical_outputs"))
    stage, speedup = summary["cells"][0]["stages"]["drafter"], summary["cells"][0]["speedup"]["1"]
    fields = {
        f for record in (summary, summary["cells"][0], summary["comparisons"][0], *nested, speedup) for f in record
    }
    assert [f for f in sorted(fields) if f"`{f}`" not in documented] == []
    assert f"{{{', '.join(stage)}}}" in documented
