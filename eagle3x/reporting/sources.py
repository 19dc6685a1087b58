"""Where the target, the drafter and the prompts of a run are from, and under which licence. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.hub import licence_of

if TYPE_CHECKING:
    from eagle3x.config import Config
    from eagle3x.data.config import Data, EvalPrompts
    from eagle3x.drafters.config import Drafter

OWN_LICENCE = "Apache-2.0"
"""Of the builtin prompts, which are part of eagle3x."""


@dataclass(frozen=True)
class Source:
    """Something of somebody's that went into a run.

    place: a repository of the hub, a wheel, a file or a directory. revision: the hub's commit, None elsewhere.
    licence: in the words of its card; None if none is said.
    """

    what: str
    place: str
    revision: str | None
    licence: str | None


def sources_of(cfg: Config, target: Path, drafter: Path | None, prompts: Mapping[str, Any]) -> tuple[Source, ...]:
    """The sources of a run. target, drafter: their directories. prompts: the facts of its prompts."""
    origin = prompts.get("origin", {})
    named = str(cfg.target.path or cfg.target.wheel or cfg.target.hub_id)
    found = [Source("target", named, _commit(target), licence_of(target))]
    if drafter is not None:
        found.append(Source("drafter", _drafter_place(cfg.drafter), _commit(drafter), licence_of(drafter)))
    for what, read in (("prompts", cfg.data), ("eval prompts", cfg.eval)):
        if read.source != "held_out":
            found.append(_prompts(what, read, origin.get("data" if what == "prompts" else "eval", {})))
    for what, reused in (("train text", cfg.responses), ("train states", cfg.hidden_states)):
        if reused.source is not None:
            found.append(Source(what, reused.source, None, None))
    return tuple(found)


def _prompts(what: str, read: Data | EvalPrompts, origin: Mapping[str, Any]) -> Source:
    match read.source:
        case "builtin":
            return Source(what, "builtin", None, OWN_LICENCE)
        case "magpie":
            return Source(what, "written by the target (magpie)", None, None)
        case _:
            part = " ".join(name for name in (read.subset, read.split) if name)
            place = f"{read.hub_id or read.path}{f', {part}' if part else ''}"
            return Source(what, place, origin.get("revision"), origin.get("licence"))


def _drafter_place(cfg: Drafter) -> str:
    return str(cfg.init_from or cfg.path or cfg.hub_id)


def _commit(directory: Path) -> str | None:
    """Of a directory in the hub's cache: it is called by its commit."""
    return directory.name if directory.parent.name == "snapshots" else None
