"""What a diagnosis says in one sentence: what is wrong, and what to change first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3x.benchmark.bootstrap import Interval
from eagle3x.reporting.words import figure, first_line, minus

NAMES = {
    "trained": "as trained",
    "exported": "as exported",
    "responses": "on its own text",
    "states": "on its own states",
    "served": "as served",
}
"""Of the rungs: what is added on each."""
SPOKEN = {
    "offset_serving": "wrong layers are fed",
    "offset_training": "it was trained on other layers than it says",
    "columns_swapped": "its layers are read in the wrong order",
    "inputs_swapped": "its attention reads embedding and hidden state the wrong way round",
    "rotary_layout": "its rotary pairs are laid out another way",
    "norm_variant": "a norm option is wrong",
    "random_embedding": "its embedding is not the target's",
    "d2t_missing": "its vocabulary map is missing",
    "d2t_shifted": "its vocabulary map is shifted",
    "stale_vocabulary": "its vocabulary map is another one's",
    "wrong_template": "prompts have another template",
    "max_positions": "its positions end too early",
    "rope_base": "its rotary base is wrong",
    "wrong_algorithm": "the engine does not run EAGLE-3",
    "other_target": "it was made for another target",
    "normed_states": "it is fed normed states",
    "quantized_states": "quantization moves the states",
    "quantized_text": "the quantized target writes other text",
    "attention": "the attention kernels move the states",
    "engine_states": "the serving engine's states differ",
    "other_text": "the served target writes other text",
    "weak_drafter": "the drafter is weak",
    "overfit": "the drafter is weak on text that it was not trained on",
    "export_changed": "the export changed it",
    "unloadable": "the checkpoint cannot be loaded",
    "engine": "the engine accepts less than its states explain",
}
"""What each cause is called."""
BY = {
    "trained": "the training",
    "exported": "the export",
    "responses": "the text",
    "states": "the states that are fed",
    "served": "the engine itself",
}
"""What a rung blames."""
GET_SERVED = "remove that reason, or serve in another way (serve.*), and run again: what is made is reused"


def verdict(diagnosis: Mapping[str, Any], measured: bool) -> str:
    """One sentence: what is wrong and what to change, or that nothing is.

    A drafter that could not be served is told as that first: what is sound before the engine says nothing of it.
    measured: whether the engine's counters are there.
    """
    found, repair = _found(diagnosis)
    reason = not_climbed(diagnosis)
    if reason is None or measured:
        first = f". To change first: {repair}" if repair else ""
        return f"Diagnosis: {found}{first}" + (f"; no further: {reason}" if reason else "")
    shown = f"{found} (to change: {repair})" if repair else found
    return f"Diagnosis: the drafter could not be served: {reason}; shown without serving: {shown}; to do: {GET_SERVED}"


def not_climbed(diagnosis: Mapping[str, Any]) -> str | None:
    """Why the last rung, the engine itself, was not climbed; None if it was."""
    last = diagnosis["rungs"][-1]
    return None if last["tau"] is not None else first_line(last["skipped"])


def sweep_verdict(found: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Of diagnosed cells, by label: in how many tau is lost, where most, and by what."""
    broken = [(label, step) for label, d in found for step in d["steps"] if step["verdict"] == "broken"]
    unserved = sum(not_climbed(d) is not None for _, d in found)
    unsure = sum(any(step["verdict"] == "cannot tell" for step in d["steps"]) for _, d in found)
    but = [f"{unserved} could not be climbed to the engine"] * bool(unserved)
    but += [f"in {unsure} a loss that counts might be hidden"] * bool(unsure)
    said = f"{len(found)} cells" + (f" ({', '.join(but)})" if but else "")
    named = [(label, cause) for label, d in found for cause in d["causes"]]
    if not broken and named:
        label, cause = named[0]
        return f"Diagnosis: no rung is broken in {said}, but in “{label}” {SPOKEN[cause['kind']]}"
    if not broken:
        return f"Diagnosis: no loss shown in {said}"
    label, step = min(broken, key=lambda pair: pair[1]["difference"]["value"])
    worst = f"most in “{label}” by {BY[step['rung']]}, {figure(Interval(**step['difference']), 2, True)}"
    return f"Diagnosis: tau is lost in {len({label for label, _ in broken})} of {said}, {worst}"


def _found(diagnosis: Mapping[str, Any]) -> tuple[str, str | None]:
    """What the climbed rungs show, and the repair of what lost most."""
    causes = diagnosis["causes"]
    if causes:
        said = "; ".join(SPOKEN[c["kind"]] + (f" (tau {_signed(c['lost'])})" if c["lost"] else "") for c in causes)
        first = min(causes, key=lambda c: c["lost"]["value"] if c["lost"] else 0.0)
        return said, first["repair"]
    unsure = [step for step in diagnosis["steps"] if step["verdict"] == "cannot tell"]
    if unsure:
        said = "; ".join(f"{NAMES[step['rung']]}: {step['prompts_needed']} prompts needed" for step in unsure)
        return f"no loss shown, but one that counts might be hidden ({said})", None
    climbed = [rung for rung in diagnosis["rungs"] if rung["tau"] is not None]
    first, last = climbed[0], climbed[-1]
    if len(climbed) == 1:
        return f"only one rung could be climbed, {NAMES[first['name']]}: tau {first['tau']['value']:.2f}", None
    return (
        f"nothing is lost from the drafter {NAMES[first['name']]} (tau {first['tau']['value']:.2f}) to"
        f" {NAMES[last['name']]} ({last['tau']['value']:.2f})"
    ), None


def _signed(record: Mapping[str, float]) -> str:
    return minus(f"{record['value']:+.2f}")
