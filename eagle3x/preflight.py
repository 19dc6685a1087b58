"""Everything that can be known to be wrong before any work: paths, engines, combinations. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from eagle3x import pipeline, targets
from eagle3x.capture import CaptureError, native_layer_ids, reader_of, trained_boundaries
from eagle3x.config import Config, TargetConfig
from eagle3x.data import dump_files, reuse, sources
from eagle3x.data.chat_template import refuse_unread
from eagle3x.drafters import location
from eagle3x.drafters import origin as origins
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.config import Drafter
from eagle3x.drafters.export import NOT_TRAINED
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
    sources.check(cfg.eval)
    reuse.check(cfg.responses.source)
    dump_files.check(cfg.hidden_states.source)
    location.check(cfg.drafter)
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
    if cfg.data.chat_template_kwargs:
        try:
            refuse_unread(target.chat_template, cfg.data.chat_template_kwargs)
        except EagleError as error:
            raise ConfigError(str(error)) from error
    boundaries = trained_boundaries(cfg.target.aux_layer_ids, cfg.capture.offset, target.num_blocks)
    reasons = [reason for slot in slots_in_use(cfg) for reason in _refusals(slot, cfg, target)]
    stages = pipeline.plan(cfg.stage, cfg)
    if "hidden_states" in stages and not reasons:
        identity = adapter(cfg.backend.name).identity(cfg.extract_slot, target, cfg.hardware)
        try:
            native_layer_ids(reader_of(identity, target.model_class), boundaries, target.num_blocks)
        except CaptureError as error:
            reasons.append(f"extract: {error}")
    if "hidden_states" in stages and cfg.hidden_states.source is not None:
        has_texts = cfg.responses.source is not None
        reasons += dump_files.unusable(cfg.hidden_states.source, target.hidden_size, boundaries, has_texts)
    if "drafter" in stages and cfg.drafter.source == "custom":
        reasons += cfg.train.refusals(cfg.hardware.device, target.head_dim)
        if cfg.train.freeze_head and cfg.drafter.init == "random" and cfg.drafter.init_from is None:
            reasons.append("train.freeze_head=true keeps a random head for ever: use drafter.init=warm_start")
    planned = drafter_plan(cfg, target) if "drafter" in stages and not reasons else None
    if "benchmark" in stages and planned is not None and cfg.stage != "diagnose":
        reasons += _drafter_refusals(cfg, target, planned)
    if reasons:
        raise ConfigError("\n".join(dict.fromkeys(reasons)))


def unserved(cfg: Config, target: Target) -> str | None:
    """Why the drafter cannot be served here at all; None if it can. A diagnosis climbs the other rungs then."""
    reasons = _refusals(cfg.serve_slot, cfg, target)
    if not reasons:
        reasons = _drafter_refusals(cfg, target, drafter_plan(cfg, target))
    return "; ".join(dict.fromkeys(reasons)) or None


def _refusals(slot: Slot, cfg: Config, target: Target) -> list[str]:
    return [f"{slot.role}: {reason}" for reason in adapter(slot.backend.name).refusals(slot, target, cfg.hardware)]


def _drafter_refusals(cfg: Config, target: Target, planned: DrafterPlan) -> list[str]:
    serving = adapter(cfg.serve.backend.name)
    return [f"serve: {r}" for r in serving.drafter_refusals(cfg.serve_slot, target, cfg.hardware, planned)]


def drafter_plan(cfg: Config, target: Target) -> DrafterPlan:
    """What the config (or the config.json of a drafter that is there already) says of the drafter to be served.

    Raises ConfigError for a published drafter that cannot be read, or whose boundaries nobody knows.
    """
    boundaries = trained_boundaries(cfg.target.aux_layer_ids, cfg.capture.offset, target.num_blocks)
    sampled = bool(cfg.benchmark.above_zero)
    if not cfg.drafter.published:
        return DrafterPlan(len(boundaries), boundaries, _variants(cfg.drafter), cfg.speculation, sampled)
    file = location.at_hand(cfg.drafter)
    if file is None:  # on the hub: looked at again when it was loaded
        return DrafterPlan(len(boundaries), None, frozenset(), cfg.speculation, sampled)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        architecture = Architecture.from_config(raw, cfg.drafter.made_by)
        origin = origins.of(cfg.drafter, raw, target.num_blocks)
    except (ValueError, EagleError) as error:
        raise ConfigError(f"{file.parent}: {error}") from error
    fine_tuned = cfg.drafter.init_from is not None
    served = "export" in pipeline.plan(cfg.stage, cfg) and cfg.serve.capture == "trained"
    if origin.boundaries is None and (fine_tuned or served):
        raise ConfigError(f"{file.parent}: {origin.said_by}" + ("" if fine_tuned else f". {NOT_TRAINED}"))
    if fine_tuned and origin.boundaries != boundaries:
        raise ConfigError(
            f"{file.parent} was trained on boundaries {list(origin.boundaries or ())} ({origin.said_by}), but the"
            f" states are to be of {list(boundaries)}: set target.aux_layer_ids (and capture) to what it reads"
        )
    fed = origin.boundaries if cfg.serve.capture == "trained" else None
    return DrafterPlan(architecture.num_aux, fed, _variants(architecture), cfg.speculation, sampled)


def _variants(described: Drafter | Architecture) -> frozenset[str]:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return frozenset(name for name in names if getattr(described, name))


def slots_in_use(cfg: Config) -> list[Slot]:
    """The engine slots that this run's stages need. A diagnosis goes on without the one that serves (`unserved`)."""
    stages = pipeline.plan(cfg.stage, cfg)
    slots: list[Slot] = []
    if "responses" in stages or (cfg.data.source == "magpie" and "prompts" in stages):
        slots.append(cfg.generate_slot)
    if "hidden_states" in stages or cfg.stage == "diagnose":
        slots.append(cfg.extract_slot)
    if "benchmark" in stages and cfg.stage != "diagnose":
        slots.append(cfg.serve_slot)
    return slots


def check_store(root: Path) -> None:
    """The store's folder must be one that we can make and write into."""
    existing = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigError(f"artifacts={root}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"artifacts={root}: {existing} cannot be written into")
