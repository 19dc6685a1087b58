"""Stage hidden_states: the target's states of every response, captured by the extracting engine, in shards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from eagle3x.capture import trained_boundaries
from eagle3x.data.records import read_prompts, read_responses
from eagle3x.data.shards import Shards, ShardSpec, ShardWriter, estimate_bytes, require_space
from eagle3x.diagnosis.planted import planted_in
from eagle3x.engines.config import LOGS, Job
from eagle3x.progress import log, track
from eagle3x.quantization import in_slot
from eagle3x.types import EagleError, HiddenStates, Response, Split, TokenSample

if TYPE_CHECKING:
    from eagle3x.engines.base import Engine
    from eagle3x.pipeline import StageRun

TOKENS_PER_SHARD, BYTES_PER_SHARD = 8192, 1 << 27
"""A shard ends at whichever comes first: a kill can lose half a minute of two CPU cores, or a few seconds of a GPU."""
PEEK_TOKENS = 16


def make(run: StageRun) -> dict[str, Any]:
    """Write `train/`, `val/` and `eval/` below `run.work`, going on where a killed attempt stopped.

    The capture probe runs before any state of the engine is written: EagleError if they are not those of the boundaries
    asked for. Train samples in which the target wrote nothing (an empty loss mask) are left out and counted.
    With `hidden_states.from` the train split comes from that dump, once the dump was probed.
    """
    from eagle3x.diagnosis.probe import probe_capture
    from eagle3x.engines import adapter

    responses = read_responses(run.inputs["responses"].path)
    _require_distinct(responses)
    target, slot, source = run.target, run.slot("extract"), run.cfg.hidden_states.source
    boundaries = trained_boundaries(target.aux_layer_ids, run.cfg.capture.offset, target.num_blocks)
    splits: tuple[Split, ...] = get_args(Split)
    dumped = None
    if source is not None:
        dumped = _import(run, Path(source), responses, boundaries)
        splits = ("val", "eval")
    kept = [r for r in responses if r.split in splits and (r.split != "train" or any(r.loss_mask))]
    if source is None and not any(r.split == "train" for r in kept):
        raise EagleError("no train sample has a token that the target wrote: there is nothing to train on")
    longest = max(kept, key=lambda r: len(r.token_ids))
    job = Job(len(longest.token_ids), run.work / LOGS)
    with adapter(slot.backend.name).open(slot, target, run.cfg.hardware, job) as engine:
        reference = in_slot.reference_target(slot, target, run.cfg.hardware)
        verdict = probe_capture(engine, reference, boundaries, longest.token_ids[: run.cfg.capture.probe_tokens])
        log(verdict.describe())
        if not verdict.matched:
            raise EagleError(
                f"{slot.backend.name} does not capture boundaries {list(boundaries)} of {target.name}:"
                f" {verdict.describe()}. Nothing of it was written."
            )
        spec = _spec(engine, kept, boundaries, target.hidden_size, run.cfg.capture.dtype)
        writers = {split: ShardWriter(run.work / split, spec, tokens_per_shard(spec)) for split in splits}
        done = {sample for writer in writers.values() for sample in writer.done_ids}
        waiting = [r for r in kept if r.id not in done]
        require_space(run.work, estimate_bytes([len(r.token_ids) for r in waiting], spec))
        for split in splits:
            _capture(run, engine, [r for r in waiting if r.split == split], writers[split], split)
    written = {split: Shards(run.work / split) for split in get_args(Split)}
    return {
        "splits": {split: _counts([r for r in responses if r.split == split], written[split]) for split in written},
        "tokens": sum(shards.tokens for shards in written.values()),
        "bytes": sum(shards.bytes for shards in written.values()),
        "boundaries": list(boundaries),
        "capture_probe": verdict.as_dict(),
        "dump": dumped,
        "dtype": spec.dtype,
        "last_norm": spec.last_norm,
    }


def _import(run: StageRun, source: Path, responses: Sequence[Response], boundaries: tuple[int, ...]) -> dict[str, Any]:
    """Take the train split over from a dump, once it is known what is in it."""
    from eagle3x.data.dump_import import probed, write_train
    from eagle3x.data.dumps import Dump
    from eagle3x.data.leaks import HeldOut

    dump = Dump(source, run.target.hidden_size)
    of = in_slot.reference_target(run.slot("extract"), run.target, run.cfg.hardware)
    verdict = probed(dump, of, boundaries, run.cfg.capture.probe_tokens)
    texts = [r for r in responses if r.split == "train"]
    asked = [r.token_ids[: r.prompt_tokens] for r in responses if r.split != "train"]
    evaluation = [p for p in read_prompts(run.inputs["prompts"].path) if p.split == "eval"]
    held_out = HeldOut(evaluation, asked, run.target.tokenizer)
    directory = run.work / "train"
    return write_train(dump, verdict, texts, held_out, run.cfg.capture.dtype, directory, tokens_per_shard)


def tokens_per_shard(spec: ShardSpec) -> int:
    """How many tokens of such states make a shard."""
    return max(1, min(TOKENS_PER_SHARD, BYTES_PER_SHARD // spec.bytes_per_token))


def _counts(responses: Sequence[Response], shards: Shards) -> dict[str, int]:
    """Of one split. What was left out is the difference of `responses` and `samples`, and has an empty mask."""
    return {
        "responses": len(responses),
        "samples": len(shards),
        "tokens": shards.tokens,
        "empty_masks": sum(not any(r.loss_mask) for r in responses),
        "cut_samples": sum(r.cut_tokens > 0 for r in responses),
        "cut_tokens": sum(r.cut_tokens for r in responses),
    }


def _require_distinct(responses: Sequence[Response]) -> None:
    repeated = [id_ for id_, count in Counter(r.id for r in responses).items() if count > 1]
    if repeated:
        raise EagleError(f"responses with the same id: {', '.join(repeated[:5])}; ids must differ across all splits")


def _spec(
    engine: Engine, responses: Sequence[Response], boundaries: tuple[int, ...], hidden_size: int, dtype: str
) -> ShardSpec:
    """What the engine's states are: seen on the first tokens of a sample, so that the disk is asked beforehand."""
    first = responses[0]
    peek = TokenSample(first.id, first.token_ids[:PEEK_TOKENS])
    found = list(engine.capture([peek], boundaries))  # to the end: an engine may have to be heard out
    if len(found) != 1:
        raise EagleError(f"the engine returned {len(found)} states for sample {first.id}")
    states = found[0]
    own = str(states.aux.dtype).removeprefix("torch.")
    return ShardSpec(boundaries, hidden_size, own if dtype == "auto" else dtype, states.last_norm)


def _capture(run: StageRun, engine: Engine, responses: Sequence[Response], writer: ShardWriter, split: Split) -> None:
    """Capture what is still missing, longest first (so that a sample that does not fit fails at once), and close."""
    ordered = sorted(responses, key=lambda r: len(r.token_ids), reverse=True)
    missing = {r.id: r for r in ordered}
    start = time.monotonic()
    samples = [TokenSample(r.id, r.token_ids) for r in ordered]
    with writer:
        states = _states(run, engine, samples, writer.spec.boundaries) if samples else ()
        for captured in track(states, f"Hidden states ({split})", len(samples)):
            response = missing.pop(captured.id, None)
            if response is None:
                raise EagleError(f"the engine returned states of {captured.id}, which was not asked for or came twice")
            writer.add(captured, response)
        if missing:
            names = ", ".join(list(missing)[:5])
            raise EagleError(f"the engine returned no states for {len(missing)} {split} samples: {names}")
    tokens, seconds = sum(len(r.token_ids) for r in ordered), time.monotonic() - start
    if tokens:
        log(f"Hidden states ({split}): {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tok/s)")


def _states(
    run: StageRun, engine: Engine, samples: Sequence[TokenSample], boundaries: tuple[int, ...]
) -> Iterator[HiddenStates]:
    """What the engine captures; in a control with a fault of capture, what a wrong engine would."""
    faults = planted_in("hidden_states", run.cfg.planted)
    if not faults:
        return engine.capture(samples, boundaries)
    from eagle3x.diagnosis.faults import capture

    log(f"hidden states: planted on purpose: {', '.join(faults)}")
    return capture(engine, samples, boundaries, faults, run.target)
