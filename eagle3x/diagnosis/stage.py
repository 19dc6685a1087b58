"""The diagnose stage: climb the ladder, look for causes, and say what to change.

diagnosis.json    rungs, steps, the grid of offset and states, causes, finder
corrected/        the served checkpoint as the finder says that it should be, if it found something to correct
logs/             of the engines that captured states
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from eagle3x.benchmark.bootstrap import Bootstrap, Interval
from eagle3x.benchmark.measure import spread
from eagle3x.capture import reader_of
from eagle3x.data.records import read_responses
from eagle3x.diagnosis.captured_text import CapturedText, Text, captured
from eagle3x.diagnosis.conditions import Condition, boundaries_of, replay_all
from eagle3x.diagnosis.corrected import corrected
from eagle3x.diagnosis.drift import cost, drift
from eagle3x.diagnosis.evidence import Evidence, SlotDifference, causes, finder_causes, header
from eagle3x.diagnosis.finder import find
from eagle3x.diagnosis.found import Found
from eagle3x.diagnosis.hypotheses import boundaries_needed
from eagle3x.diagnosis.inputs import Loaded, Served, eval_text, load, served_by
from eagle3x.diagnosis.ladder import Rung, climb
from eagle3x.diagnosis.offset_quantization import OffsetQuantization, two_by_two
from eagle3x.diagnosis.outlook import train_gap, worth
from eagle3x.drafters import checkpoint
from eagle3x.drafters.export import CHECKPOINT, Export, Fed, read_export
from eagle3x.engines import adapter
from eagle3x.engines.config import LOGS, Job, Slot
from eagle3x.progress import log, track
from eagle3x.types import EagleError, SpecCounters

if TYPE_CHECKING:
    from eagle3x.drafters.checkpoint import Published
    from eagle3x.pipeline import StageRun

DIAGNOSIS, CORRECTED = "diagnosis.json", "corrected"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Plain:
    """What the extracting engine's states show.

    claimed: the boundaries that the drafter was trained on, as far as anybody knows or replay shows. counters: by
    condition, in the order of the texts. kept: the first eval texts, with states of the boundaries around those.
    """

    claimed: tuple[int, ...]
    counters: dict[str, tuple[SpecCounters, ...]]
    found: Found | None
    kept: tuple[CapturedText, ...]


def make(run: StageRun) -> dict[str, Any]:
    """Write `diagnosis.json` into `run.work`; the facts are its verdict.

    Raises:
        EagleError: no rung can be climbed, or an engine does not do what it promises.
    """
    cfg = run.cfg
    k = cfg.speculation.num_speculative_tokens
    bootstrap = Bootstrap(cfg.benchmark.resamples, cfg.benchmark.confidence, cfg.seed)
    export = read_export(run.inputs["export"].path)
    slot = run.slot("serve")
    fed = _fed(run, export)
    responses = read_responses(run.inputs["responses"].path, "eval")
    chosen = spread(responses, [r.category for r in responses], cfg.benchmark.max_prompts)
    served, not_served = served_by(run, chosen)
    texts = tuple(eval_text(r, k) for r in chosen)
    loaded = load(run, export)

    states = _plain(run, loaded, export, fed, texts, served, bootstrap)
    claimed, plain, found_by_replay = states.claimed, states.counters, states.found
    own, not_captured, drifted = _own(run, loaded, fed, states, served, bootstrap)
    rungs = _rungs(loaded, plain, own, served, not_served, not_captured, claimed, fed, run)
    ladder = climb(rungs, [t.id for t in texts], bootstrap)
    grid = _grid(plain, own, claimed, fed, served, bootstrap)
    evidence = Evidence(
        ladder=ladder,
        claimed=export.trained,
        fed=fed.predicted,
        changes=loaded.changes,
        unloadable=loaded.unloadable,
        grid=grid,
        slots=slot_differences(run.slot("extract"), slot),
        headers=_headers(run, served),
        probe_fed=_contradiction(served),
        served_limit=_position_limit(export),
        finder=() if found_by_replay is None else finder_causes(found_by_replay, ladder.first),
        longest=max(len(t.token_ids) for t in (served.texts if served else texts)),
        break_even=_break_even(served),
        gap=_gap(run, loaded, bootstrap),
    )
    found = causes(evidence)
    record = {
        "schema_version": SCHEMA_VERSION,
        **ladder.as_dict(),
        "claimed": list(claimed),
        "said_by": export.note,
        "fed": None if fed.predicted is None else list(fed.predicted),
        "offset_quantization": None if grid is None else grid.as_dict(),
        "slots": [vars(difference) for difference in evidence.slots],
        "break_even": evidence.break_even,
        "causes": [cause.as_dict() for cause in found],
        "drift": drifted,
        "train_gap": None if evidence.gap is None else asdict(evidence.gap),
        "estimate": _estimate(run, loaded, states, served, bootstrap),
        "finder": None if found_by_replay is None else found_by_replay.as_dict(),
    }
    if found_by_replay is not None and found_by_replay.named:
        record["finder"]["corrected"] = _corrected(run, export, loaded, found_by_replay)
    (run.work / DIAGNOSIS).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for cause in found:
        log(f"diagnosis: {cause.kind} ({cause.rung}): {cause.sentence}; {cause.as_dict()['repair']}")
    return {"causes": [cause.kind for cause in found], "broken": [step.rung for step in ladder.broken]}


def _fed(run: StageRun, export: Export) -> Fed:
    """What the serving engine is predicted to feed; refused, if it is not here and cannot be asked what it is."""
    slot = run.slot("serve")
    try:
        identity = adapter(slot.backend.name).identity(slot, run.target, run.cfg.hardware)
    except EagleError as error:
        return Fed(None, str(error), None)
    return export.fed(reader_of(identity, run.target.model_class))


def _shifted(run: StageRun, claimed: tuple[int, ...], fed: Fed) -> tuple[int, ...] | None:
    """The lower row of the grid: what is fed wrong, else one block late (or early at the target's end)."""
    if fed.predicted is not None and fed.predicted != claimed and len(fed.predicted) == len(claimed):
        return fed.predicted
    by = 1 if claimed[-1] + 1 < run.target.num_blocks else -1
    shifted = tuple(b + by for b in claimed)
    return shifted if shifted[0] >= 1 else None


def _plain(
    run: StageRun,
    loaded: Loaded,
    export: Export,
    fed: Fed,
    texts: tuple[Text, ...],
    served: Served | None,
    bootstrap: Bootstrap,
) -> Plain:
    """Replays on the extracting engine's states, of the eval text and of the served text, and what the finder found."""
    diagnose, k = run.cfg.diagnose, run.cfg.speculation.num_speculative_tokens
    with _open(run, run.slot("extract"), (*texts, *(served.texts if served else ()))) as engine:
        inner = {b for b in fed.predicted or () if 1 <= b < run.target.num_blocks}
        needed = sorted({*boundaries_needed(export.trained or fed.predicted, run.target), *inner})
        first = texts[: max(diagnose.finder_prompts, diagnose.drift_prompts)]
        parts = track([first] if first else [], "states", 1)
        kept = [states for part in parts for states in captured(engine, part, needed)]
        found = None
        if diagnose.finder_prompts:
            some = kept[: diagnose.finder_prompts]
            found = find(_looked_at(run, export), run.target, some, export.trained, k, bootstrap)
            log(f"finder: {found.sentence}")
        claimed = export.trained or fed.predicted or (found and found.boundaries)
        if claimed is None:
            raise EagleError(f"nobody knows which boundaries the drafter reads, and it cannot be served: {fed.refused}")
        alike = loaded.trained is not None and loaded.served is not None and not loaded.changes
        on_eval = [Condition("trained", loaded.trained, claimed)] if loaded.trained is not None else []
        if loaded.served is not None and not alike:
            on_eval.append(Condition("exported", loaded.served, claimed))
        same_text = served is not None and served.texts == texts
        on_served = []
        if served is not None and loaded.served is not None:
            on_served = [] if same_text else [Condition("responses", loaded.served, claimed)]
            if (shifted := _shifted(run, claimed, fed)) is not None:
                on_served.append(Condition("shifted_plain", loaded.served, shifted))
        conditions = [*on_eval, *on_served]
        if served is None or same_text:  # one text: its states are captured once
            counters = replay_all(engine, texts, conditions, k, "ladder: eval text", kept, needed if kept else ())
        else:
            also = needed if kept else boundaries_of(conditions)
            counters = replay_all(engine, texts, on_eval, k, "ladder: eval text", kept, also)
            counters |= replay_all(engine, served.texts, on_served, k, "ladder: served text", kept, also)
        if alike:  # the same weights, read the same way
            counters["exported"] = counters["trained"]
        if same_text and loaded.served is not None:
            counters["responses"] = counters["exported"]
    return Plain(claimed, counters, found, tuple(kept))


def _looked_at(run: StageRun, export: Export) -> Published:
    """What the finder reads: of a drafter that was trained here what training left, since what the export did to it is
    known from its weights; else what is served."""
    trained_here = run.cfg.drafter.source == "custom"
    return checkpoint.read(run.inputs["drafter"].path / CHECKPOINT if trained_here else export.directory)


def _corrected(run: StageRun, export: Export, loaded: Loaded, found: Found) -> dict[str, Any]:
    """Write the served checkpoint as the finder says that it should be, or say why that cannot be."""
    if loaded.changes:
        return {"refused": "the export changed more than this: export again from the trained weights"}
    named = [n.hypothesis for n in found.named]
    try:
        written = corrected(checkpoint.read(export.directory), named, run.target, run.work / CORRECTED)
    except EagleError as error:
        return {"refused": str(error)}
    log(f"diagnosis: the corrected checkpoint is {CORRECTED}/ of this artifact")
    return {"keys": list(written.keys), "tensors": list(written.tensors), "sglang_refused": written.sglang_refused}


def _own(
    run: StageRun, loaded: Loaded, fed: Fed, plain: Plain, served: Served | None, bootstrap: Bootstrap
) -> tuple[dict[str, tuple[SpecCounters, ...]], str | None, dict[str, Any] | None]:
    """Replays of the served text on the serving engine's own states, or why there are none; and how far they drifted
    from those of the extracting engine."""
    claimed, extract, slot = plain.claimed, run.slot("extract"), run.slot("serve")
    if loaded.served is None:
        return {}, "the served checkpoint cannot be loaded", None
    if served is None:
        return {}, "there is no served text", None
    if fed.predicted is None:
        return {}, fed.refused, None
    if len(fed.predicted) != len(claimed):
        return {}, f"{len(fed.predicted)} boundaries are fed, the drafter reads {len(claimed)}", None
    if slot.backend.url is not None:
        reason = "an attached server cannot be asked for its states; start the engine here (serve.backend.url=null)"
        return {}, reason, None
    shifted = _shifted(run, claimed, fed)
    conditions = {"states": fed.predicted, "right_served": claimed, "shifted_served": shifted}
    if _same_states(run, extract, slot):
        by_boundaries = {claimed: plain.counters["responses"], shifted: plain.counters.get("shifted_plain")}
        found = {name: by_boundaries.get(b) for name, b in conditions.items() if b is not None}
        return {name: rows for name, rows in found.items() if rows is not None}, None, None
    asked = [Condition(name, loaded.served, b) for name, b in conditions.items() if b is not None]
    k, some = run.cfg.speculation.num_speculative_tokens, plain.kept[: run.cfg.diagnose.drift_prompts]
    with _open(run, slot, (*served.texts, *(s.text for s in some))) as engine:
        drifted = None
        both = boundaries_of(asked)
        if some:
            other = [c.only(claimed) for c in captured(engine, [s.text for s in some], both)]
            distance = drift(some, other)
            drifted = {
                "states": distance.as_dict(),
                "cost": cost(loaded.served, some, other, distance, claimed, k, bootstrap).as_dict(),
            }
        return replay_all(engine, served.texts, asked, k, "ladder: the serving engine's states"), None, drifted


def _same_states(run: StageRun, extract: Slot, serve: Slot) -> bool:
    """Whether both slots are the same engine, so that capturing again would give the same."""
    one, other = (adapter(s.backend.name).identity(s, run.target, run.cfg.hardware) for s in (extract, serve))
    return one == other


def _open(run: StageRun, slot: Slot, texts: tuple[Text, ...]) -> Any:
    job = Job(max(len(t.token_ids) for t in texts), run.work / LOGS)
    return adapter(slot.backend.name).open(slot, run.target, run.cfg.hardware, job)


def _rungs(
    loaded: Loaded,
    plain: dict[str, tuple[SpecCounters, ...]],
    own: dict[str, tuple[SpecCounters, ...]],
    served: Served | None,
    not_served: str | None,
    not_captured: str | None,
    claimed: tuple[int, ...],
    fed: Fed,
    run: StageRun,
) -> list[Rung]:
    extract, serve = run.slot("extract"), run.slot("serve")
    states = f"states of {described(extract)} at {list(claimed)}"
    elsewhere = "the drafter was not trained here" if loaded.trained is None else None
    unloadable = None if loaded.unloadable is None else f"the checkpoint cannot be loaded: {loaded.unloadable}"
    return [
        _rung("trained", f"module as trained, eval text, {states}", plain, elsewhere),
        _rung("exported", f"served checkpoint, eval text, {states}", plain, unloadable),
        _rung("responses", f"text of {described(serve)}, {states}", plain, unloadable or not_served),
        _rung("states", f"states of {described(serve)} at {list(fed.predicted or ())}", own, not_captured),
        Rung("served", f"counted by {described(serve)}", served.counters if served else None, not_served),
    ]


def _rung(name: Any, what: str, found: dict[str, tuple[SpecCounters, ...]], why_not: str | None) -> Rung:
    return Rung(name, what, found.get(name), None if name in found else why_not)


def described(slot: Slot) -> str:
    """The slot in a few words."""
    quantized = "" if slot.quantization.scheme == "none" else f" {slot.quantization.scheme}"
    attention = "" if slot.attention.name == "auto" else f" {slot.attention.name}"
    return f"{slot.backend.name}{quantized}{attention}"


def slot_differences(extract: Slot, serve: Slot) -> tuple[SlotDifference, ...]:
    """In what the states that were trained on and those that are served may differ."""
    pairs = (
        ("engine", extract.backend.name, serve.backend.name),
        ("quantization", extract.quantization.scheme, serve.quantization.scheme),
        ("attention", extract.attention.name, serve.attention.name),
        ("dtype", extract.backend.dtype, serve.backend.dtype),
    )
    return tuple(SlotDifference(what, a, b) for what, a, b in pairs if a != b)


def _grid(
    plain: dict[str, tuple[SpecCounters, ...]],
    own: dict[str, tuple[SpecCounters, ...]],
    claimed: tuple[int, ...],
    fed: Fed,
    served: Served | None,
    bootstrap: Bootstrap,
) -> OffsetQuantization | None:
    cells = [plain.get("responses"), plain.get("shifted_plain"), own.get("right_served"), own.get("shifted_served")]
    whole = [cell for cell in cells if cell is not None]
    if served is None or len(whole) < len(cells):
        return None
    hypothetical = fed.predicted == claimed
    by = 1 if hypothetical else 0
    shifted = tuple(b + by for b in claimed) if hypothetical else tuple(fed.predicted or ())
    return two_by_two(whole, [t.id for t in served.texts], claimed, shifted, hypothetical, bootstrap)


def _headers(run: StageRun, served: Served | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The tokens before a response: in the text that was learned from (held out like it), and in the served text."""
    if served is None:
        return None
    learned = [r for r in read_responses(run.inputs["responses"].path, "eval") if r.prompt_tokens]
    return (
        header([r.token_ids[: r.prompt_tokens] for r in learned]),
        header([t.token_ids[: t.prompt_tokens] for t in served.texts]),
    )


def _contradiction(served: Served | None) -> tuple[int, ...] | None:
    """The boundaries that the serve probe says are fed, where they are not the predicted ones."""
    probe = served.cell["boundaries"]["serve_probe"] if served else None
    return tuple(probe["fed"]) if probe is not None and probe["verdict"] == "wrong" else None


def _position_limit(export: Export) -> int:
    config = json.loads((export.directory / "config.json").read_text(encoding="utf-8"))
    return int(config["max_position_embeddings"])


def _break_even(served: Served | None) -> float | None:
    """tau from which on the measured steps pay: what a verify step costs in plain ones. None without a timing pass."""
    speedup = served.cell["speedup"] if served else None
    if not speedup:
        return None
    first = next(iter(speedup.values()))
    return None if first["tau"] is None else first["tau"] / first["decode"]["value"]


def _gap(run: StageRun, loaded: Loaded, bootstrap: Bootstrap) -> Interval | None:
    """tau on held-out text - tau on train text, of a drafter that was trained here."""
    if loaded.trained is None or "hidden_states" not in run.inputs:
        return None
    k = run.cfg.speculation.num_speculative_tokens
    gap = train_gap(loaded.trained, run.inputs["hidden_states"].path, k, bootstrap)
    return None if gap is None else gap.difference


def _estimate(
    run: StageRun, loaded: Loaded, plain: Plain, served: Served | None, bootstrap: Bootstrap
) -> dict[str, Any] | None:
    speedup = served.cell["speedup"] if served else None
    if loaded.served is None or not speedup or len(plain.kept) < 2:
        return None
    k = run.cfg.speculation.num_speculative_tokens
    found = worth(loaded.served, plain.kept, plain.claimed, k, speedup, bootstrap)
    return None if found is None else found.as_dict()
