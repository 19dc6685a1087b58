"""A stage sees what it declares, and nothing else."""

from __future__ import annotations

import pytest

from eagle3x.composition import cells
from eagle3x.pipeline import STAGES, plan
from eagle3x.stage_view import UndeclaredNodeError, View


def test_declared_nodes_read_undeclared_ones_do_not() -> None:
    cfg = cells([], multirun=False)[0].config
    view = View.of(cfg, ("train", "serve.capture"), "drafter")
    assert view.train.epochs == cfg.train.epochs
    assert view.serve.capture == "trained"
    for path in ("sampling", "seed"):
        with pytest.raises(UndeclaredNodeError, match=path):
            getattr(view, path)
    with pytest.raises(UndeclaredNodeError, match=r"serve\.backend"):
        _ = view.serve.backend


def test_every_declared_node_exists() -> None:
    cfg = cells([], multirun=False)[0].config
    for stage in STAGES.values():
        for path in (*stage.identity, *stage.placement):
            node = cfg
            for part in path.split("."):
                node = getattr(node, part)


def test_plans() -> None:
    cfg = cells([], multirun=False)[0].config
    assert plan("report", cfg) == ["prompts", "responses", "hidden_states", "drafter", "export", "benchmark"]
    assert plan("hidden_states", cfg) == ["prompts", "responses", "hidden_states"]
    foreign = cells(["drafter=pretrained", "drafter.path=/ckpt"], multirun=False)[0].config
    assert plan("report", foreign) == ["prompts", "responses", "drafter", "export", "benchmark"]
