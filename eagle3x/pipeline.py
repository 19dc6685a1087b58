"""The stages, what each needs, and which config nodes make its result what it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.artifacts import Artifact, ArtifactSpec, Store
from eagle3x.diagnosis.planted import planted_in
from eagle3x.progress import log
from eagle3x.stage_identity import identities
from eagle3x.stage_view import View
from eagle3x.targets import require_same
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.config import Config
    from eagle3x.engines.config import Slot
    from eagle3x.targets import Target


@dataclass(frozen=True)
class Stage:
    """`identity` nodes are hashed, `placement` nodes only readable; a maker sees no other part of the config.

    `version` is raised whenever the same inputs would give another output.
    """

    needs: tuple[str, ...]
    identity: tuple[str, ...]
    placement: tuple[str, ...]
    make: str
    version: int = 1
    wants: tuple[str, ...] = ()
    """Stages that it uses if they can be made; if one fails, the reason is handed on (`StageRun.failed`)."""


EXTRACT = ("backend", "quantization", "attention")
STAGES = {
    "prompts": Stage((), ("data", "eval"), (), "eagle3x.data.prompts:make", version=2),
    "responses": Stage(
        ("prompts",),
        ("target", "generate", "sampling", "data", "seed", "responses", "hidden_states"),
        ("hardware",),
        "eagle3x.data.responses:make",
        version=3,
    ),
    "hidden_states": Stage(
        ("responses",),
        ("target", *EXTRACT, "capture", "hidden_states"),
        ("hardware", "planted"),
        "eagle3x.data.extraction:make",
        version=2,
    ),
    "drafter": Stage(
        ("hidden_states",),
        ("target", "quantization", "capture", "drafter", "train", "seed"),
        ("hardware",),
        "eagle3x.training.train:make",
        version=3,
    ),
    "export": Stage(
        ("drafter",),
        ("target", "serve.capture", "serve.aux_layer_ids"),
        ("planted",),
        "eagle3x.drafters.export:make",
        version=2,
    ),
    "benchmark": Stage(
        ("export", "responses"),
        ("target", "serve", "benchmark", "speculation", "hardware", "seed"),
        ("capture", "sampling", "planted"),
        "eagle3x.benchmark.measure:make",
        version=2,
    ),
    "diagnose": Stage(
        ("export", "responses", "drafter"),
        ("target", *EXTRACT, "serve", "capture", "speculation", "benchmark", "diagnose", "seed"),
        ("hardware", "drafter"),
        "eagle3x.diagnosis.stage:make",
        version=2,
        wants=("benchmark",),
    ),
}


@dataclass(frozen=True)
class StageRun:
    """What a maker gets: the declared config, a directory to write into (and resume from), and its inputs."""

    cfg: Config
    """Typed as the whole config for its attribute paths; reading an undeclared node raises `UndeclaredNode`."""
    work: Path
    inputs: Mapping[str, Artifact]
    target: Target
    slots: Mapping[str, Slot]
    failed: Mapping[str, str] = field(default_factory=dict)
    """Of the stages that it wants: why there is no such input."""

    def slot(self, role: str) -> Slot:
        """The engine slot `extract`, `generate` or `serve`."""
        return self.slots[role]


def declared(name: str, cfg: Config) -> Stage:
    """The stage as this config has it: prompts that the target writes depend on the target and its engine too, and what
    has a fault planted is another thing than what has none."""
    stage = STAGES[name]
    if name == "prompts" and cfg.data.source == "magpie":
        return replace(stage, identity=(*stage.identity, "target", "generate", "seed"), placement=("hardware",))
    if planted_in(name, cfg.planted):
        return replace(stage, identity=(*stage.identity, "planted"))
    return stage


def needs(name: str, cfg: Config) -> tuple[str, ...]:
    """The stages that `name` reads. A pretrained drafter needs no states; a dump may hold what eval prompts ask."""
    if name == "drafter" and cfg.drafter.source == "pretrained":
        return ()
    if name == "diagnose" and cfg.drafter.source == "custom":
        return (*STAGES[name].needs, "hidden_states")
    if name == "hidden_states" and cfg.hidden_states.source is not None:
        return (*STAGES[name].needs, "prompts")
    return STAGES[name].needs


def plan(goal: str, cfg: Config) -> list[str]:
    """`goal` and everything below it, in order of work."""
    goals = ["benchmark"] if goal == "report" else [goal]
    ordered: list[str] = []
    while goals:
        name = goals[-1]
        missing = [n for n in (*needs(name, cfg), *STAGES[name].wants) if n not in ordered]
        if missing:
            goals.extend(missing)
            continue
        goals.pop()
        if name not in ordered:
            ordered.append(name)
    return sorted(ordered, key=list(STAGES).index)


def run(
    goal: str,
    cfg: Config,
    snapshot: dict[str, Any],
    target: Target,
    store: Store,
    missing: dict[str, str] | None = None,
) -> Iterator[Artifact]:
    """Make or reuse every artifact up to `goal`, one by one. Whatever was finished before an error stays.

    `snapshot` is the resolved config as plain values, kept in each manifest. `missing`: stages that cannot be made, and
    why; like a stage that fails, that is an error unless the stage is only wanted. One that fails is added to it.
    """
    slots = {slot.role: slot for slot in (cfg.extract_slot, cfg.generate_slot, cfg.serve_slot)}
    made: dict[str, Artifact] = {}
    failed = {} if missing is None else missing
    wanted = STAGES[goal].wants if goal in STAGES else ()
    for name in plan(goal, cfg):
        if name in failed:
            log(f"{name}: skipped: {failed[name]}")
            continue
        try:
            made[name] = _stage(name, cfg, snapshot, target, store, slots, made, failed)
        except EagleError as error:
            if name not in wanted:
                raise
            failed[name] = str(error)
            log(f"{name}: failed: {failed[name].partition(chr(10))[0]}")
            continue
        yield made[name]


def _stage(
    name: str,
    cfg: Config,
    snapshot: dict[str, Any],
    target: Target,
    store: Store,
    slots: Mapping[str, Slot],
    made: Mapping[str, Artifact],
    failed: Mapping[str, str],
) -> Artifact:
    stage = declared(name, cfg)
    spec = _spec(name, cfg, target, made, snapshot)
    view = View.of(cfg, (*stage.identity, *stage.placement), name)
    artifact = store.get_or_make(spec, partial(_make, stage, view, spec.parents, target, slots, failed))
    if "target" in spec.identity:  # whatever lies under this key: a copied folder may be another target's
        what = f"artifact {name} {artifact.key}"
        require_same(artifact.manifest.identity["target"], spec.identity["target"], what)
    log(f"{name}: {'reused' if artifact.reused else 'made'} {artifact.key}")
    return artifact


def finished(goal: str, cfg: Config, target: Target, store: Store) -> dict[str, Artifact]:
    """What is in the store of the stages up to `goal`: all of them, or those before the first that is not there."""
    found: dict[str, Artifact] = {}
    for name in plan(goal, cfg):
        artifact = store.lookup(_spec(name, cfg, target, found, {}))
        if artifact is None:
            break
        found[name] = artifact
    return found


def _spec(
    name: str, cfg: Config, target: Target, made: Mapping[str, Artifact], snapshot: dict[str, Any]
) -> ArtifactSpec:
    stage = declared(name, cfg)
    inputs = {parent: made[parent] for parent in (*needs(name, cfg), *stage.wants) if parent in made}
    return ArtifactSpec(name, stage.version, identities(name, stage.identity, cfg, target), inputs, snapshot)


def _make(
    stage: Stage,
    cfg: Config,
    inputs: Mapping[str, Artifact],
    target: Target,
    slots: Mapping[str, Slot],
    failed: Mapping[str, str],
    work: Path,
) -> Mapping[str, Any]:
    module, function = stage.make.split(":")
    return getattr(import_module(module), function)(StageRun(cfg, work, inputs, target, slots, failed))
