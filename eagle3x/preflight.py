"""Everything that can be known to be wrong before any work: paths, engines, combinations. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from eagle3x import pipeline, targets
from eagle3x.capture import CaptureError, native_layer_ids, reader_of, trained_boundaries
from eagle3x.config import Config, TargetConfig
from eagle3x.data import sources
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.config import Drafter
from eagle3x.engines import adapter
from eagle3x.engines.base import DrafterPlan
from eagle3x.engines.config import Slot
from eagle3x.reporting.wandb import logged_in
from eagle3x.target_sources import converted, pinned
from eagle3x.targets import Target
from eagle3x.types import ConfigError, EagleError


def check(cfg: Config) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: what is wrong, where, and what would be right.
    """
    targets.check(cfg.target)
    sources.check(cfg.data)
    check_drafter(cfg.drafter)
    check_store(Path(cfg.artifacts))
    if cfg.stage == "report" and cfg.tracking.mode == "online" and not logged_in():
        raise ConfigError("tracking=online needs a login: run `wandb login`, or use tracking=offline")
    for slot in slots_in_use(cfg):
        adapter(slot.backend.name)
    if at_hand(cfg.target):
        check_with_target(cfg, targets.resolve(cfg.target))


def at_hand(cfg: TargetConfig) -> bool:
    """Whether the target can be read without a download or a conversion (which imports torch)."""
    return cfg.path is not None or (cfg.wheel is not None and converted(pinned(cfg.wheel)) is not None)


def check_with_target(cfg: Config, target: Target) -> None:
    """What needs the target's config: boundaries that exist, engines that can run it."""
    boundaries = trained_boundaries(cfg.target.aux_layer_ids, cfg.capture.offset, target.num_blocks)
    reasons = [
        f"{slot.role}: {reason}"
        for slot in slots_in_use(cfg)
        for reason in adapter(slot.backend.name).refusals(slot, target, cfg.hardware)
    ]
    stages = pipeline.plan(cfg.stage, cfg)
    if "hidden_states" in stages and not reasons:
        identity = adapter(cfg.backend.name).identity(cfg.extract_slot, target, cfg.hardware)
        try:
            native_layer_ids(reader_of(identity, target.model_class), boundaries, target.num_blocks)
        except CaptureError as error:
            reasons.append(f"extract: {error}")
    if "benchmark" in stages and not reasons:
        planned = drafter_plan(cfg, target)
        serving = adapter(cfg.serve.backend.name)
        reasons += [f"serve: {r}" for r in serving.drafter_refusals(cfg.serve_slot, target, cfg.hardware, planned)]
    if reasons:
        raise ConfigError("\n".join(dict.fromkeys(reasons)))


def drafter_plan(cfg: Config, target: Target) -> DrafterPlan:
    """What the config (or the config.json of a drafter that is there already) says of the drafter to be served."""
    boundaries = trained_boundaries(cfg.target.aux_layer_ids, cfg.capture.offset, target.num_blocks)
    speculation, described = cfg.speculation, cfg.drafter
    if cfg.drafter.source == "custom":
        return DrafterPlan(len(boundaries), boundaries, _variants(described), speculation)
    if cfg.drafter.path is None:  # on a hub: known when it was loaded
        return DrafterPlan(len(boundaries), None, frozenset(), speculation)
    raw = json.loads((Path(cfg.drafter.path) / "config.json").read_text(encoding="utf-8"))
    try:
        architecture = Architecture.from_config(raw)
    except EagleError as error:
        raise ConfigError(f"drafter.path={cfg.drafter.path}: {error}") from error
    return DrafterPlan(architecture.num_aux, None, _variants(architecture), speculation)


def _variants(described: Drafter | Architecture) -> frozenset[str]:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return frozenset(name for name in names if getattr(described, name))


def slots_in_use(cfg: Config) -> list[Slot]:
    """The engine slots that this run's stages open."""
    stages = pipeline.plan(cfg.stage, cfg)
    slots: list[Slot] = []
    if "responses" in stages:
        slots.append(cfg.generate_slot)
    if "hidden_states" in stages:
        slots.append(cfg.extract_slot)
    if "benchmark" in stages:
        slots.append(cfg.serve_slot)
    return slots


def check_store(root: Path) -> None:
    """The store's folder must be one that we can make and write into."""
    existing = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigError(f"artifacts={root}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"artifacts={root}: {existing} cannot be written into")


def check_drafter(drafter: Drafter) -> None:
    """A drafter's directory must hold a checkpoint."""
    if drafter.path is None:
        return
    folder = Path(drafter.path)
    if not folder.is_dir():
        raise ConfigError(f"drafter.path={drafter.path}: no such directory")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"drafter.path={drafter.path}: has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"drafter.path={drafter.path}: has no *.safetensors file (other formats are not read)")
