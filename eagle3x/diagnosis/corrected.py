"""A drafter as it should have been published: config.json with what was found, the weights linked where it suffices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3x.capture import KEY, NESTED
from eagle3x.diagnosis.hypotheses import Hypothesis, changed
from eagle3x.drafters import checkpoint
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.checkpoint import Published
from eagle3x.drafters.config_keys import is_speculators
from eagle3x.drafters.export import link, rewrite_ids
from eagle3x.drafters.location import CONFIG
from eagle3x.targets import Target
from eagle3x.types import EagleError

ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class Corrected:
    """What was written. keys: of config.json that differ. tensors: that differ; none: the weights are hard links.

    sglang_refused: why the directory cannot say its boundaries to SGLang, if they were rewritten and it cannot.
    """

    directory: Path
    keys: tuple[str, ...]
    tensors: tuple[str, ...]
    sglang_refused: str | None


def corrected(published: Published, found: Sequence[Hypothesis], target: Target, directory: Path) -> Corrected:
    """Write the checkpoint with all of `found` put right into `directory`, and load it as a proof.

    published: read from a directory. Its config is kept but for what is wrong in it, its tensors are kept bit for bit
    but for those that are wrong; a checkpoint in speculators' format is written in ours. What is written means to the
    engines what it says, whoever made the original (`drafter.made_by` is not needed any more).

    Raises EagleError if there is nothing to correct, a change is beyond any checkpoint (`last_column`), `directory`
    has something in it, or the result is still refused by `checkpoint.module`.
    """
    if not found:
        raise EagleError("nothing was found that a corrected checkpoint could put right")
    beyond = [h.sentence for h in found if h.last_column]
    if beyond:
        raise EagleError(f"no checkpoint can say this to an engine: {'; '.join(beyond)}")
    if directory.exists() and any(directory.iterdir()):
        raise EagleError(f"{directory} is not empty: name a new directory for the corrected drafter")
    right = published
    for hypothesis in found:
        right = changed(right, hypothesis)
    before, after = published.tensors, right.tensors
    differing = sorted(n for n in before.keys() | after.keys() if before.get(n) is not after.get(n))
    source = Path(published.where)
    files = sorted([*source.glob("*.safetensors"), *source.glob("*.safetensors.index.json")])
    config = _config(published, right.arch)
    if differing or is_speculators(published.config) or not files:
        dtype = published.tensors["fc.weight"].dtype
        tensors = {n: (t.to(dtype) if n in differing and t.is_floating_point() else t) for n, t in after.items()}
        checkpoint.write(directory, tensors, config)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            link(file, directory / file.name)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    boundaries = next((h.boundaries for h in reversed(found) if h.boundaries is not None), None)
    refused = None if boundaries is None else rewrite_ids(directory, boundaries, target)
    checkpoint.load(directory, target)
    written = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    keys = sorted(k for k in written.keys() | published.config.keys() if written.get(k) != published.config.get(k))
    return Corrected(directory, tuple(keys), tuple(differing), refused)


def _config(published: Published, arch: Architecture) -> dict[str, Any]:
    """The published config with the keys changed that do not mean `arch` to the engines."""
    wanted = arch.to_config()
    if is_speculators(published.config):
        ids = {key: published.config[key] for key in (KEY, NESTED) if key in published.config}
        return {**wanted, "torch_dtype": published.dtype, **ids}
    config = dict(published.config)
    read = Architecture.from_config(config).to_config()
    differing = {key for key in read.keys() | wanted.keys() if read.get(key) != wanted.get(key)}
    if differing & set(ROPE):
        differing -= set(ROPE)
        config = {key: value for key, value in config.items() if key not in ROPE}
        config |= {key: wanted[key] for key in ROPE if key in wanted}
    if "fc_norm" in differing:
        config.pop("use_aux_norm", None)
    if "norm_before_fc" in differing and NESTED in config:
        config[NESTED] = {key: value for key, value in config[NESTED].items() if key != "norm_before_fc"}
    return config | {key: wanted[key] for key in differing}
