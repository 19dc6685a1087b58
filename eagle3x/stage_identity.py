"""What each declared config node contributes to a key: contents instead of paths, boundaries instead of ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.capture import trained_boundaries
from eagle3x.data import reuse, sources
from eagle3x.diagnosis.planted import planted_in
from eagle3x.drafters import location
from eagle3x.engines import adapter
from eagle3x.fingerprint import fingerprint_directory
from eagle3x.identity import identity_of
from eagle3x.quantization import in_slot
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.config import Config
    from eagle3x.engines.config import Slot
    from eagle3x.targets import Target


def identities(stage: str, nodes: Sequence[str], cfg: Config, target: Target) -> dict[str, Any]:
    """The identity of each node that `stage` declares, as plain JSON values."""
    return {node: _identity(stage, node, cfg, target) for node in nodes}


def _identity(stage: str, node: str, cfg: Config, target: Target) -> Any:
    def engine(slot: Slot) -> dict[str, Any]:
        return adapter(slot.backend.name).identity(slot, target, cfg.hardware)

    match node:
        case "seed" if stage == "responses" and cfg.sampling.temperature == 0:
            return None  # greedy text has no seed: training seeds share it
        case "target":
            return target.identity()
        case "data":
            return {**identity_of(cfg.data), "content": sources.identity(cfg.data)}
        case "eval":
            return {**identity_of(cfg.eval), "content": sources.identity(cfg.eval)}
        case "responses":
            content = reuse.fingerprint(cfg.responses.source)
            # Texts that ask what an eval prompt asks were kept before there was this mark.
            return {"content": content} if content is None else {"content": content, "without": "leaks"}
        case "hidden_states" if stage == "responses":
            return {"dump": cfg.hidden_states.source is not None}  # train text is not asked for, whatever is in it
        case "hidden_states":
            directory = cfg.hidden_states.source
            return {"content": None if directory is None else fingerprint_directory(Path(directory))}
        case "backend":
            return engine(cfg.extract_slot)
        case "generate":
            return engine(cfg.generate_slot)
        case "serve" if stage == "diagnose":
            try:
                return engine(cfg.serve_slot)
            except EagleError as error:  # the engine is not here: its rungs are skipped
                return {"missing": str(error)}
        case "serve":
            return engine(cfg.serve_slot)
        case "quantization":
            return {**identity_of(cfg.quantization), **in_slot.identity(cfg.extract_slot, target, cfg.hardware)}
        case "attention":
            return identity_of(cfg.attention)
        case "capture":
            # Two conventions that mean the same boundaries share their states.
            boundaries = trained_boundaries(cfg.target.aux_layer_ids, cfg.capture.offset, target.num_blocks)
            return {
                "boundaries": list(boundaries),
                "dtype": cfg.capture.dtype,
                "probe_tokens": cfg.capture.probe_tokens,
            }
        case "drafter":
            return {**identity_of(cfg.drafter), "content": location.fingerprint(cfg.drafter)}
        case "planted":
            return list(planted_in(stage, cfg.planted))
        case "serve.capture":
            return cfg.serve.capture
        case "serve.aux_layer_ids":
            ids = cfg.serve.aux_layer_ids or cfg.target.aux_layer_ids
            return list(ids) if cfg.serve.capture in ("as_is", "plus_one") else None
        case _:
            value: Any = cfg
            for part in node.split("."):
                value = getattr(value, part)
            return identity_of(value)
