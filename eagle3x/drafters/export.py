"""Export: the directory that is served. Weights are linked, the config is written for the readers of layer ids.

checkpoint/config.json          with the ids that `serve.capture` asks for
checkpoint/model.safetensors    hard link to the drafter's
export.json                     boundaries trained, and what each known reader will feed
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.capture import (
    KEY,
    NESTED,
    SGLANG_VERSIONS,
    CaptureError,
    ExportedKeys,
    Reader,
    exported_keys,
    predicted_boundaries,
)
from eagle3x.diagnosis.planted import planted_in
from eagle3x.drafters.architecture import Architecture
from eagle3x.progress import log
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.engines.config import ServeSlot
    from eagle3x.pipeline import StageRun
    from eagle3x.targets import Target

CHECKPOINT = "checkpoint"
RECORD = "export.json"
SCHEMA_VERSION = 1
VLLM_VERSION = "0.32.0"
NOT_TRAINED = "serve.capture=published serves its layer ids as they are, whatever they mean to the engine"


@dataclass(frozen=True)
class Fed:
    """What a reader feeds the drafter: `predicted` boundaries, or why it is `refused`.

    mismatched: predicted differs from trained; None where either is not known.
    """

    predicted: tuple[int, ...] | None
    refused: str | None
    mismatched: bool | None


@dataclass(frozen=True)
class Export:
    """An exported drafter. `trained`: the boundaries it was trained on; None if nobody said. `note`: who said it."""

    directory: Path
    """What an engine is given."""
    trained: tuple[int, ...] | None
    num_blocks: int
    sglang_refused: str | None
    """Why no ids were written for SGLang, which would then capture its default."""
    note: str | None

    def fed(self, reader: Reader) -> Fed:
        """The boundaries that `reader` will feed, read from the config that was written."""
        config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        return _fed(reader, config, self)


def read_export(path: Path) -> Export:
    """The export artifact in `path`."""
    record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    trained = record["trained_boundaries"]
    return Export(
        path / CHECKPOINT,
        None if trained is None else tuple(trained),
        record["num_blocks"],
        record["sglang_refused"],
        record["note"],
    )


def make(run: StageRun) -> dict[str, Any]:
    """Write `checkpoint/` and `export.json` into `run.work`; the facts are those of `export.json`."""
    cfg, n = run.cfg, run.target.num_blocks
    parent = run.inputs["drafter"]
    source, directory = parent.path / CHECKPOINT, run.work / CHECKPOINT
    published = json.loads((source / "config.json").read_text(encoding="utf-8"))
    said = parent.manifest.facts
    trained, note = said["boundaries"] and tuple(said["boundaries"]), said["boundaries_said_by"]
    config, sglang_refused = served_config(published, trained, note, cfg.serve, cfg.target.aux_layer_ids, run.target)

    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    for file in sorted([*source.glob("*.safetensors"), *source.glob("*.safetensors.index.json")]):
        link(file, directory / file.name)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if faults := planted_in("export", cfg.planted):
        from eagle3x.diagnosis.faults import tamper

        log(f"export: planted on purpose: {', '.join(faults)}")
        tamper(directory, faults, run.target)

    export = Export(directory, trained, n, sglang_refused, note)
    record = {
        "schema_version": SCHEMA_VERSION,
        "serve_capture": cfg.serve.capture,
        "num_blocks": n,
        "trained_boundaries": None if trained is None else list(trained),
        "note": note,
        "sglang_refused": sglang_refused,
        "readers": [_row(reader, export) for reader in known_readers(run.target.model_class)],
    }
    (run.work / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def served_config(
    published: Mapping[str, Any],
    trained: tuple[int, ...] | None,
    note: str | None,
    serve: ServeSlot,
    target_ids: Sequence[int],
    target: Target,
) -> tuple[dict[str, Any], str | None]:
    """The drafter's config.json with the ids that `serve.capture` asks for, and why SGLang is refused, if it is.

    Raises EagleError if the ids are to be those that it was `trained` on, and nobody knows them (`note` says what to
    do), or if their number is not that which its fc reads.
    """
    refused = None
    match serve.capture:
        case "published":
            keys = None
        case "trained":
            if trained is None:
                raise EagleError(f"nobody knows which boundaries the drafter was trained on: {note}. {NOT_TRAINED}")
            keys = exported_keys(trained, target.num_blocks, target.model_class)
            refused = keys.refused
        case _:
            keys = _by_hand(serve, target_ids)
    config = dict(published)
    if keys is not None:
        _require_columns(keys, config)
        config = _with_keys(config, keys)
    config["max_position_embeddings"] = max(
        config["max_position_embeddings"], target.max_position_embeddings
    )  # a smaller one silently costs acceptance on long contexts
    return config, refused


def rewrite_ids(directory: Path, boundaries: tuple[int, ...], target: Target) -> str | None:
    """Write the ids that feed `boundaries` on each engine into a checkpoint; returns why SGLang is refused, or None."""
    file = directory / "config.json"
    keys = exported_keys(boundaries, target.num_blocks, target.model_class)
    config = json.loads(file.read_text(encoding="utf-8"))
    _require_columns(keys, config)
    file.write_text(json.dumps(_with_keys(config, keys), indent=2) + "\n", encoding="utf-8")
    return keys.refused


def known_readers(model_class: str) -> list[Reader]:
    """The readers that every export is judged by."""
    return [
        Reader("transformers"),
        Reader("vllm", VLLM_VERSION, runner="v1"),
        Reader("vllm", VLLM_VERSION, runner="v2"),
        *(Reader("sglang", version, model_class) for version in SGLANG_VERSIONS),
    ]


def _fed(reader: Reader, config: Mapping[str, Any], export: Export) -> Fed:
    if reader.engine == "sglang" and export.sglang_refused is not None:
        return Fed(None, export.sglang_refused, None)
    try:
        predicted = predicted_boundaries(reader, config, export.num_blocks)
    except CaptureError as error:
        return Fed(None, str(error), None)
    return Fed(predicted, None, None if export.trained is None else predicted != export.trained)


def _row(reader: Reader, export: Export) -> dict[str, Any]:
    fed = export.fed(reader)
    return {**asdict(reader), **asdict(fed), "predicted": None if fed.predicted is None else list(fed.predicted)}


def _by_hand(serve: ServeSlot, target_ids: Sequence[int]) -> ExportedKeys:
    """The same ids in both keys, raw or plus one, whatever they mean to a reader."""
    ids = tuple(i + (serve.capture == "plus_one") for i in serve.aux_layer_ids or target_ids)
    return ExportedKeys(ids, ids)


def _require_columns(keys: ExportedKeys, config: Mapping[str, Any]) -> None:
    reads = Architecture.from_config(config).num_aux
    if len(keys.top_level) != reads:
        raise EagleError(
            f"the drafter's fc reads {reads} boundaries, but {len(keys.top_level)} ids were asked for:"
            f" {list(keys.top_level)} (serve.aux_layer_ids, or target.aux_layer_ids)"
        )


def _with_keys(config: Mapping[str, Any], keys: ExportedKeys) -> dict[str, Any]:
    """The config with the layer ids replaced; what else its `eagle_config` says is kept."""
    written = keys.config()
    nested = {name: value for name, value in (config.get(NESTED) or {}).items() if name not in (KEY, "layer_ids")}
    nested.update(written.pop(NESTED, {}))
    result = {**config, **written}
    result.pop(NESTED, None)
    return {**result, NESTED: nested} if nested else result


def link(source: Path, destination: Path) -> None:
    """A hard link, or a copy where the store spans file systems that cannot have one."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
