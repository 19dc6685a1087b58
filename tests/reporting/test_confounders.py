from __future__ import annotations

import copy
from typing import Any

from eagle3x.config import Config
from eagle3x.reporting.comparisons import Pair, pairs
from eagle3x.reporting.confounders import Confounder, confounders, placement_paths, short_names, swept_keys

MATRIX = [
    ("backend=vllm", "capture=as_is", "seed=3"),
    ("backend=vllm", "capture=plus_one", "seed=3"),
    ("backend=sglang", "capture=as_is", "seed=3"),
    ("backend=sglang", "capture=plus_one", "seed=3"),
]


def slots(name: str) -> dict[str, Any]:
    backend = {"name": name, "dtype": "auto", "port": 8000, "memory_fraction": 0.8}
    return {"backend": backend, "quantization": {"scheme": "none"}, "attention": {"name": "auto"}}


def resolved(extract: str, generate: str, serve: str) -> dict[str, Any]:
    return {**slots(extract), "generate": slots(generate), "serve": {**slots(serve), "capture": "trained"}, "seed": 3}


def test_swept_keys_are_those_whose_values_differ() -> None:
    assert swept_keys(MATRIX) == ["backend", "capture"]
    assert swept_keys([("backend@serve.backend=vllm",), ("backend@serve.backend=sglang",)]) == ["serve.backend"]
    assert swept_keys([(), ("seed=2",)]) == ["seed"]
    assert swept_keys([("seed=1",)]) == []


def test_labels_are_the_swept_values() -> None:
    names = [" ".join(o) for o in MATRIX]
    assert short_names(MATRIX, names) == ["vllm, as_is", "vllm, plus_one", "sglang, as_is", "sglang, plus_one"]
    assert short_names([("train.epochs=3",), ("train.epochs=8",)], ["a", "b"]) == ["epochs=3", "epochs=8"]
    assert short_names([(), ("seed=2",)], ["default", "seed=2"]) == ["default", "seed=2"]
    assert short_names([("seed=1", "train.epochs=3")], ["seed=1 train.epochs=3"]) == ["this run"]
    assert short_names([("seed=1",), ("seed=1",)], ["a", "b"]) == ["a", "b"]


def test_pairs_differ_in_one_swept_key() -> None:
    assert pairs(MATRIX) == [
        Pair(1, 0, ("capture",)),
        Pair(2, 0, ("backend",)),
        Pair(3, 1, ("backend",)),
        Pair(3, 2, ("capture",)),
    ]


def test_a_long_sweep_compares_with_the_first_value_only() -> None:
    found = pairs([(f"seed={s}",) for s in range(5)])
    assert [(p.cell, p.baseline) for p in found] == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_a_cell_without_a_neighbour_is_compared_with_the_first() -> None:
    assert pairs([("a=1", "b=1"), ("a=2", "b=2")]) == [Pair(1, 0, ("a", "b"))]


def test_the_slots_that_differ_beyond_the_swept_one_are_named() -> None:
    a, b = resolved("vllm", "transformers", "vllm"), resolved("sglang", "transformers", "sglang")
    assert confounders(a, b, ["backend"], frozenset()) == [Confounder("serve.backend", ("vllm", "sglang"))]
    c = resolved("sglang", "sglang", "sglang")
    assert confounders(a, c, ["backend"], frozenset()) == [
        Confounder("generate.backend", ("transformers", "sglang")),
        Confounder("serve.backend", ("vllm", "sglang")),
    ]
    assert confounders(a, copy.deepcopy(a), [], frozenset()) == []


def test_other_keys_are_told_one_by_one_and_placement_is_not() -> None:
    a, b = resolved("vllm", "vllm", "vllm"), resolved("vllm", "vllm", "vllm")
    b["backend"]["port"] = 9000
    b["backend"]["dtype"] = "float16"
    b["seed"] = 4
    b["tracking"] = {"mode": "offline"}
    placement = frozenset({"backend.port"})
    assert confounders(a, b, [], placement) == [
        Confounder("backend.dtype", ("auto", "float16")),
        Confounder("seed", (3, 4)),
    ]
    assert confounders(a, b, ["seed", "backend"], placement) == []
    b["serve"]["quantization"]["scheme"] = "int4"
    found = confounders(a, b, ["seed", "backend"], placement)
    assert found == [Confounder("serve.quantization", ("none", "int4"))]


def test_placement_comes_from_the_schema() -> None:
    paths = placement_paths(Config)
    assert {
        "artifacts",
        "backend.port",
        "serve.backend.url",
        "generate.backend.memory_fraction",
        "target.path",
    } <= paths
    assert not {"seed", "backend.name", "serve.capture", "target.aux_layer_ids"} & paths
