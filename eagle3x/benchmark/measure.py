"""The benchmark stage: what the served drafter is accepted, what it costs, and whether replay explains it.

acceptance.jsonl, baseline.jsonl   a request a line: counters, output, times, with and without the drafter (T=0)
acceptance_t0.7.jsonl              the same with the drafter at each of benchmark.temperatures above 0
timing.jsonl                       the same of the timing pass, fixed length, legs in ABBA order
texts.jsonl                        how each served text goes on past its end, for replay
replay.jsonl                       counters that replay predicts for each request, at several boundaries (of chains)
context.json                       what the figures need to know besides
cell.json                          the figures: derived, `cell.summarise` makes them again at any time

Every file but cell.json is appended to as work is done; a killed benchmark goes on where its files end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eagle3x.benchmark.cell import (
    ACCEPTANCE,
    BASELINE,
    CELL,
    CONTEXT,
    PREDICTED,
    REPLAY,
    TIMING,
    sampled_file,
    summarise,
)
from eagle3x.benchmark.records import RequestRecord, append_lines, read_batches, read_lines, requests
from eagle3x.benchmark.runner import Workload, acceptance_pass, timing_legs, timing_pass
from eagle3x.capture import reader_of
from eagle3x.data.records import read_responses
from eagle3x.data.turns import conversations
from eagle3x.diagnosis.planted import planted_in
from eagle3x.diagnosis.serve_probe import candidates
from eagle3x.drafters.export import Export, read_export
from eagle3x.engines import adapter
from eagle3x.engines.config import LOGS, Attention, Backend, Job, Slot
from eagle3x.identity import request_seed
from eagle3x.progress import log, track
from eagle3x.quantization.in_slot import reference_quantization, reference_target
from eagle3x.quantization.stored import ROUNDED_INPUTS
from eagle3x.types import EagleError, Request, Response, TokenSample

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3x.config import Config, Hardware
    from eagle3x.diagnosis.captured_text import Captures
    from eagle3x.diagnosis.replay import ReplaySample
    from eagle3x.engines.base import Engine
    from eagle3x.pipeline import StageRun
    from eagle3x.targets import Target

T = TypeVar("T")
TEXTS = "texts.jsonl"
FEWEST_PROMPTS = 2
REPLAYED_TOGETHER = 16
"""Requests whose states are in memory at once."""


def make(run: StageRun) -> dict[str, Any]:
    """Measure the exported drafter on the eval prompts, into `run.work`.

    Raises:
        EagleError: nothing to measure, or an engine that does not do what it promises.
        InvalidCellError: a measurement that cannot be trusted.
    """
    cfg, slot, target = run.cfg, run.slot("serve"), run.target
    identity = adapter(slot.backend.name).identity(slot, target, cfg.hardware)
    export = read_export(run.inputs["export"].path)
    fed = export.fed(reader_of(identity, target.model_class))
    if fed.predicted is None:
        raise EagleError(f"this drafter cannot be served here: {fed.refused}")
    # Replay is of chains: which branch of a tree was drafted from which states is not in the text.
    is_tree = cfg.speculation.is_tree
    asked = {} if is_tree else candidate_boundaries(fed.predicted, export.trained, export.num_blocks)
    context = {
        "num_speculative_tokens": cfg.speculation.num_speculative_tokens,
        "topk": cfg.speculation.topk,
        "drafts": cfg.speculation.drafts,
        "engine": identity,
        "exact": identity["dtype"] == "float32"
        and identity["device"] == "cpu"
        and slot.quantization.scheme not in ROUNDED_INPUTS,
        "num_blocks": export.num_blocks,
        "trained": None if export.trained is None else list(export.trained),
        "predicted": list(fed.predicted),
        "mismatched": fed.mismatched,
        "candidates": {name: list(boundaries) for name, boundaries in asked.items()},
        "sampled": [{"temperature": t, "top_p": cfg.benchmark.top_p} for t in cfg.benchmark.above_zero],
    }
    (run.work / CONTEXT).write_text(json.dumps(context, indent=1) + "\n", encoding="utf-8")

    responses = read_responses(run.inputs["responses"].path, "eval")
    chosen = spread(responses, [r.category for r in responses], cfg.benchmark.max_prompts)
    prompts = len(set(conversations([r.id for r in chosen])))
    if prompts < FEWEST_PROMPTS:
        raise EagleError(f"the benchmark needs at least {FEWEST_PROMPTS} eval prompts, not {prompts}")
    if planted_in("benchmark", cfg.planted):
        from eagle3x.diagnosis.faults import without_template

        log("benchmark: planted on purpose: prompts without their template")
        chosen = [without_template(response, target) for response in chosen]
    with ExitStack() as stack:
        job = Job(_longest(chosen, run.cfg), run.work / LOGS)
        engine = stack.enter_context(adapter(slot.backend.name).open(slot, target, cfg.hardware, job))
        _passes(run, engine, export.directory, chosen)
        if is_tree:
            log("trees are not replayed: what this cell accepts is compared with a chain's by the report")
        else:
            _continue_texts(run, engine, export.directory, chosen)
            reference: Captures = engine
            if not _is_reference(slot):
                stack.close()  # two engines need not fit into the memory together
                reference = stack.enter_context(open_reference(slot, target, cfg.hardware, job))
            _replay_pass(run, reference, export, asked)
    cell = summarise(run.work, cfg)
    (run.work / CELL).write_text(json.dumps(cell, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    tau = cell["tau"]
    log(f"tau {tau['value']:.2f} ({tau['low']:.2f} to {tau['high']:.2f}) over {cell['requests']} requests")
    return {"tokens": cell["output_tokens"], "requests": cell["requests"], "tau": tau}


def spread(items: Sequence[T], categories: Sequence[str], limit: int | None) -> list[T]:
    """At most `limit` items, from every category in turn, in their own order."""
    if limit is None or limit >= len(items):
        return list(items)
    rank: dict[str, int] = {}
    turns = []
    for index, category in enumerate(categories):
        rank[category] = rank.get(category, 0) + 1
        turns.append((rank[category], index))
    return [items[index] for index in sorted(index for _, index in sorted(turns)[:limit])]


def candidate_boundaries(
    predicted: tuple[int, ...], trained: tuple[int, ...] | None, num_blocks: int
) -> dict[str, tuple[int, ...]]:
    """What replay is asked for, by name: `b` as predicted, `b-1`, `b+1`, the engines' `default`, and the boundaries
    `trained` on. Those that the target does not have, of another number, or the same as another are left out."""
    shifted = {tuple(b + by for b in predicted): f"{PREDICTED}{by:+d}" if by else PREDICTED for by in (0, -1, 1)}
    found = {shifted.get(c, "default"): c for c in candidates(predicted, num_blocks)}
    if trained is not None and len(trained) == len(predicted) and trained not in found.values():
        found["trained"] = trained
    return found


def reference_slot(slot: Slot, target: Target) -> Slot:
    """The float32 transformers forward whose states replay reads, for a drafter served elsewhere.

    Of the target as it is quantized there: on the states of another, the drafter would write other drafts.
    """
    backend = Backend(
        name="transformers", runner="auto", dtype="float32", kv_cache_dtype="auto", tensor_parallel=1,
        batch_size=slot.backend.batch_size, engine_args={}, python=None, url=None, port=None,
        memory_fraction=slot.backend.memory_fraction, start_timeout=slot.backend.start_timeout,
    )  # fmt: skip
    return Slot("extract", backend, reference_quantization(slot, target), Attention(name="auto"))


def open_reference(slot: Slot, target: Target, hardware: Hardware, job: Job) -> AbstractContextManager[Captures]:
    """What captures those states: the transformers engine, or the streamed target where that does not fit."""
    from eagle3x.diagnosis.reference import must_stream
    from eagle3x.diagnosis.streamed_reference import StreamedTarget
    from eagle3x.engines.transformers_model import device_of

    device = device_of(hardware)
    stored = reference_target(slot, target, hardware)
    if must_stream(stored, device):
        return nullcontext(StreamedTarget(stored, device))
    reference = reference_slot(slot, target)
    return adapter(reference.backend.name).open(reference, target, hardware, job)


def _longest(chosen: Sequence[Response], cfg: Config) -> int:
    """Tokens of the longest sequence that is served, with the drafts that may lie past its end."""
    written = max(cfg.sampling.eval_max_new_tokens, cfg.benchmark.timing_tokens if cfg.benchmark.timing else 0)
    return max(r.prompt_tokens for r in chosen) + written + 2 * (cfg.speculation.num_speculative_tokens + 1)


def _is_reference(slot: Slot) -> bool:
    return slot.backend.name == "transformers"


def _passes(run: StageRun, engine: Engine, drafter: Path, chosen: Sequence[Response]) -> None:
    cfg, k = run.cfg, run.cfg.speculation.num_speculative_tokens
    settings, concurrency = cfg.benchmark, cfg.benchmark.acceptance_concurrency
    categories = {r.id: r.category for r in chosen}
    limit = cfg.sampling.eval_max_new_tokens
    work = Workload(tuple(_request(r, limit) for r in chosen), categories, settings.warmup_requests)
    acceptance_pass(
        lambda: engine.serve(drafter, cfg.speculation), work, concurrency, k, run.work / ACCEPTANCE, "acceptance"
    )
    for temperature in settings.above_zero:
        drawn = replace(work, requests=tuple(_sampled(r, temperature, cfg) for r in work.requests))
        acceptance_pass(
            lambda: engine.serve(drafter, cfg.speculation),
            drawn,
            concurrency,
            k,
            run.work / sampled_file(temperature),
            f"acceptance at temperature {temperature:g}",
        )
    if not engine.can_serve_plain:
        log(
            "an attached server cannot be asked without its drafter: outputs are not compared, and no speed-up measured"
        )
        return
    acceptance_pass(lambda: engine.serve(None, None), work, concurrency, None, run.work / BASELINE, "baseline")
    if not settings.timing:
        return
    timed = spread(chosen, [r.category for r in chosen], settings.timing_prompts)
    talks = len(set(conversations([r.id for r in timed])))
    if talks < FEWEST_PROMPTS or len(timed) < max(settings.timing_concurrency):
        raise EagleError(
            f"the timing pass has {len(timed)} prompts of {talks} conversations: benchmark.timing_prompts must give at"
            f" least {FEWEST_PROMPTS}, and no fewer than the largest of"
            f" benchmark.timing_concurrency={list(settings.timing_concurrency)}"
        )
    timing_pass(
        lambda: engine.serve(None, None),
        lambda: engine.serve(drafter, cfg.speculation),
        engine.can_serve_both,
        Workload(tuple(_request(r, settings.timing_tokens, True) for r in timed), categories, settings.warmup_requests),
        timing_legs(settings.timing_concurrency, settings.timing_rounds),
        k,
        run.work / TIMING,
        "timing",
    )


def _request(response: Response, max_tokens: int, timed: bool = False) -> Request:
    """Of fixed length if it is timed, else with the gaps that explain a difference of outputs."""
    prompt = response.token_ids[: response.prompt_tokens]
    return Request(response.id, prompt, max_tokens, ignore_eos=timed, top2_gaps=not timed)


def _sampled(request: Request, temperature: float, cfg: Config) -> Request:
    """The same at a temperature above 0, where gaps explain nothing."""
    seed = request_seed(cfg.seed, request.id)
    return replace(request, temperature=temperature, top_p=cfg.benchmark.top_p, seed=seed, top2_gaps=False)


def _served(run: StageRun) -> list[RequestRecord]:
    return requests(read_batches(run.work / ACCEPTANCE))


def _continue_texts(run: StageRun, engine: Engine, drafter: Path, chosen: Sequence[Response]) -> None:
    """k more tokens of each served text, since drafts are accepted past its stop. Where the engine wrote what the eval
    text says, that text's own continuation is taken; else a server that still runs is asked."""
    k, file = run.cfg.speculation.num_speculative_tokens, run.work / TEXTS
    known = {line["id"] for line in read_lines(file)}
    by_id = {r.id: r for r in chosen}
    found, unknown = [], []
    for record in _served(run):
        if record.id in known:
            continue
        response, output = by_id[record.id], record.completion.token_ids
        end = response.prompt_tokens + response.response_tokens
        further = response.token_ids[end : end + k]
        if output == response.token_ids[response.prompt_tokens : end] and len(further) == k:
            found.append(
                {"id": record.id, "prompt_ids": response.token_ids[: response.prompt_tokens], "further": further}
            )
        else:
            unknown.append(Request(record.id, _text(response, output), k, ignore_eos=True))
    if unknown:
        log(f"{len(unknown)} served texts are not the eval text: the engine writes how they go on")
        served = (None, None) if engine.can_serve_plain else (drafter, run.cfg.speculation)
        with engine.serve(*served) as endpoint:
            for completion in endpoint.complete(unknown, run.cfg.benchmark.acceptance_concurrency):
                prompt = by_id[completion.id].token_ids[: by_id[completion.id].prompt_tokens]
                found.append({"id": completion.id, "prompt_ids": prompt, "further": completion.token_ids})
    append_lines(file, found)


def _text(response: Response, output: tuple[int, ...]) -> tuple[int, ...]:
    return response.token_ids[: response.prompt_tokens] + output


def _replay_pass(run: StageRun, engine: Captures, export: Export, asked: Mapping[str, tuple[int, ...]]) -> None:
    """Counters of every request by replay, at each candidate's boundaries, from reference states of the served text."""
    from eagle3x.diagnosis.replay import counters, replay, replay_detailed
    from eagle3x.drafters.checkpoint import load

    k, file = run.cfg.speculation.num_speculative_tokens, run.work / REPLAY
    done = {line["id"] for line in read_lines(file)}
    texts = {line["id"]: line for line in read_lines(run.work / TEXTS)}
    waiting = [record for record in _served(run) if record.id not in done]
    if not waiting:
        return
    drafter = load(export.directory, run.target).eval().requires_grad_(False)
    union = sorted({b for boundaries in asked.values() for b in boundaries})
    parts = [waiting[i : i + REPLAYED_TOGETHER] for i in range(0, len(waiting), REPLAYED_TOGETHER)]
    for part in track(parts, "replay", len(parts)):
        samples = [
            TokenSample(r.id, (*texts[r.id]["prompt_ids"], *r.completion.token_ids, *texts[r.id]["further"]))
            for r in part
        ]
        states = {s.id: s for s in engine.capture(samples, union)}

        def fed(boundaries: Sequence[int], part: Sequence[RequestRecord] = part, states: Any = states) -> Iterator[Any]:
            for record in part:
                yield _sample(record, states[record.id].token_ids, _columns(states[record.id].aux, union, boundaries))

        steps = replay_detailed(drafter, fed(asked[PREDICTED]), k)
        others = {name: replay(drafter, fed(b), k) for name, b in asked.items() if name != PREDICTED}
        append_lines(
            file,
            [
                {
                    "id": record.id,
                    **asdict(counters(steps[i], k)),
                    "draft_gap": min((step.gap for step in steps[i]), default=None),
                    "others": {name: asdict(others[name][i]) for name in others},
                }
                for i, record in enumerate(part)
            ],
        )


def _sample(record: RequestRecord, token_ids: tuple[int, ...], aux: Tensor) -> ReplaySample:
    import torch

    from eagle3x.diagnosis.replay import ReplaySample

    tokens = torch.tensor(token_ids)
    return ReplaySample(record.id, tokens, aux, record.prompt_tokens, len(record.completion.token_ids))


def _columns(aux: Tensor, captured: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """[T, len(captured)*H] to [T, len(wanted)*H]."""
    import torch

    parts = dict(zip(captured, aux.chunk(len(captured), dim=-1), strict=True))
    return torch.cat([parts[b] for b in wanted], dim=-1)
