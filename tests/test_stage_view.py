"""A stage sees what it declares, and nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3x.composition import cells
from eagle3x.identity import digest
from eagle3x.pipeline import STAGES, plan
from eagle3x.stage_identity import identities
from eagle3x.stage_view import UndeclaredNodeError, View
from eagle3x.targets import Target, resolve


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


def test_greedy_text_is_shared_by_seeds_and_sampled_text_is_not(tiny_target: Target) -> None:
    def key(*overrides: str) -> str:
        fixed = ["target=directory", f"target.path={tiny_target.path}", "target.aux_layer_ids=[1,2,4]"]
        cfg = cells([*fixed, *overrides], multirun=False)[0].config
        return digest(identities("responses", STAGES["responses"].identity, cfg, tiny_target))

    assert key("seed=1") == key("seed=2")
    assert key("seed=1", "sampling.temperature=0.5") != key("seed=2", "sampling.temperature=0.5")


def test_two_conventions_that_mean_the_same_boundaries_share_states(tiny_target: Target) -> None:
    def key(*overrides: str) -> str:
        cfg = cells(["target=directory", f"target.path={tiny_target.path}", *overrides], multirun=False)[0].config
        return digest(identities("hidden_states", STAGES["hidden_states"].identity, cfg, tiny_target))

    assert key("target.aux_layer_ids=[2,3,5]") == key("target.aux_layer_ids=[1,2,4]", "capture=plus_one")
    assert key("target.aux_layer_ids=[2,3,5]") != key("target.aux_layer_ids=[1,2,4]")


def test_other_weights_template_or_tokenizer_change_every_engine_made_key(tiny_target: Target, tmp_path: Path) -> None:
    fixed = ["target=directory", f"target.path={tiny_target.path}", "target.aux_layer_ids=[1,2,4]"]
    cfg = cells(fixed, multirun=False)[0].config
    seen = set()
    for name in ("same", "template", "weights"):
        copy = tmp_path / name
        shutil.copytree(tiny_target.path, copy)
        if name == "template":
            (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        if name == "weights":
            blob = bytearray((copy / "model.safetensors").read_bytes())
            blob[-1] ^= 1
            (copy / "model.safetensors").write_bytes(blob)
        target = resolve(replace(cfg.target, path=str(copy)))
        seen.add(digest(identities("hidden_states", STAGES["hidden_states"].identity, cfg, target)))
    assert len(seen) == 3
    assert digest(identities("hidden_states", STAGES["hidden_states"].identity, cfg, tiny_target)) in seen
