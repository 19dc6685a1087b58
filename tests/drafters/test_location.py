"""A published drafter's key is its content: where it lies, and which branch it came from, changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from eagle3x.composition import cells
from eagle3x.drafters import location
from eagle3x.identity import digest
from eagle3x.pipeline import STAGES
from eagle3x.stage_identity import identities
from eagle3x.targets import Target

FIXTURE = Path(__file__).parent.parent / "fixtures" / "drafters" / "specforge-yarn"


def key(target: Target, *overrides: str) -> str:
    fixed = ["target=directory", f"target.path={target.path}", "target.aux_layer_ids=[1,3,4]"]
    cfg = cells([*fixed, *overrides], multirun=False)[0].config
    return digest(identities("drafter", STAGES["drafter"].identity, cfg, target))


def test_the_hubs_content_is_the_key(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    branches = {"main": tmp_path / "main", "v2": tmp_path / "v2", "same": tmp_path / "same"}
    for directory in branches.values():
        shutil.copytree(FIXTURE, directory)
    config = json.loads((FIXTURE / "config.json").read_text())
    (branches["v2"] / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    asked: list[dict[str, Any]] = []

    def download(hub_id: str, **arguments: Any) -> str:
        asked.append({"hub_id": hub_id, **arguments})
        return str(branches[arguments["revision"] or "main"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub = ("drafter=pretrained", "drafter.hub_id=org/drafter")
    main, v2, same = (key(tiny_target, *hub, f"drafter.revision={r}") for r in branches)
    assert main == same != v2
    assert key(tiny_target, "drafter=pretrained", f"drafter.path={FIXTURE}") == main
    assert asked[0]["allow_patterns"] == ["config.json", "README.md", "*.safetensors"]
    assert asked[0]["ignore_patterns"] == ["*/*"]
    key(tiny_target, *hub, "drafter.allow_bin=true")
    assert asked[-1]["allow_patterns"] == ["config.json", "README.md", "*.safetensors", "*.bin"]


def test_what_training_starts_from_is_part_of_the_key(tiny_target: Target, tmp_path: Path) -> None:
    scratch, tuned = key(tiny_target), key(tiny_target, f"drafter.init_from={FIXTURE}")
    assert scratch != tuned
    moved = shutil.copytree(FIXTURE, tmp_path / "moved")
    assert key(tiny_target, f"drafter.init_from={moved}") == tuned
    assert key(tiny_target, f"drafter.init_from={moved}", "drafter.made_by=specforge") != tuned


def test_aq_medai_is_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = cells(["drafter=aq_medai"], multirun=False)[0].config.drafter
    assert location.named(cfg) == (None, "AQ-MedAI/Kimi-K2-Instruct-eagle3", "drafter.hub_id")
    location.check(cfg)
    assert location.at_hand(cfg) is None  # nothing is downloaded to find out
