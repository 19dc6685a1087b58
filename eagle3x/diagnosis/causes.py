"""What is wrong, by name, and what to change: the ladder says where acceptance is lost, other evidence says why.

`corrected/` in a repair is the checkpoint that the diagnosis wrote beside its findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eagle3x.benchmark.statistics import Interval

Kind = Literal[
    "offset_serving",
    "offset_training",
    "columns_swapped",
    "inputs_swapped",
    "rotary_layout",
    "norm_variant",
    "random_embedding",
    "d2t_missing",
    "d2t_shifted",
    "stale_vocabulary",
    "wrong_template",
    "max_positions",
    "rope_base",
    "wrong_algorithm",
    "other_target",
    "normed_states",
    "quantized_states",
    "quantized_text",
    "attention",
    "engine_states",
    "other_text",
    "weak_drafter",
    "overfit",
    "export_changed",
    "unloadable",
    "engine",
]
REPAIRS: dict[Kind, str] = {
    "offset_serving": "export with serve.capture=trained: it writes for each engine the ids that feed what was trained",
    "offset_training": "serve the boundaries that it was trained on (as in corrected/), or capture its states anew",
    "columns_swapped": "put fc's columns in ascending order of the boundaries",
    "inputs_swapped": "put the columns of q_proj, k_proj and v_proj in the order [embedding; hidden state]",
    "rotary_layout": "write q_proj and k_proj with rotary pairs d/2 rows apart, as transformers has them",
    "norm_variant": "write the norm option that it was trained with into config.json",
    "random_embedding": "leave embed_tokens out of the checkpoint: both engines then share the target's",
    "d2t_missing": "write d2t, the offset of each draft id to its target id, into the checkpoint",
    "d2t_shifted": "write the d2t that it was trained with into the checkpoint",
    "stale_vocabulary": "export d2t and t2d from the training run that made these weights",
    "wrong_template": "serve with the chat template (and its settings) that the train text was rendered with",
    "max_positions": "raise max_position_embeddings to the target's in the drafter's config.json",
    "rope_base": "write the rope_theta that it was trained with into config.json",
    "wrong_algorithm": "start the engine with EAGLE3, not EAGLE",
    "other_target": "use a drafter that was trained for this target",
    "normed_states": "feed the residual stream as it is, not normed",
    "quantized_states": "train on states of the target as it is served (quantization=<that of serve>)",
    "quantized_text": "train on text that the target writes as it is served (quantization@generate.quantization=...)",
    "attention": "extract and serve with the same attention backend, or train on this one's states",
    "engine_states": "extract with the engine that serves (backend=<that of serve>)",
    "other_text": "train on text that the served target writes",
    "weak_drafter": "train longer, on more or fitting data: nothing between training and serving loses as much",
    "overfit": "train on more text, or for fewer epochs",
    "export_changed": "export again from the trained weights",
    "unloadable": "repair what the message names",
    "engine": "compare the engine's speculative settings and version with what was exported; its log is kept",
}


@dataclass(frozen=True)
class Cause:
    """Something that costs acceptance. `rung`: where it shows; `lost`: what it costs in tau (below 0), if measured.

    repair: what to change; if nothing more is known, what the kind asks for.
    """

    kind: Kind
    rung: str
    sentence: str
    lost: Interval | None
    repair: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "repair": self.repair or REPAIRS[self.kind]}


def distinct(causes: Sequence[Cause]) -> list[Cause]:
    """One of each kind, the first: it has the better evidence."""
    found: dict[str, Cause] = {}
    for cause in causes:
        found.setdefault(cause.kind, cause)
    return list(found.values())
