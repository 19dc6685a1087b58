"""Stage `responses`: prompts answered by the target (or taken as given), as token ids with loss masks.

`train` is written by the configured sampling. `val` and `eval` are the target's greedy text, so that chain speculation
can be replayed on it, and go on past their stop: engines count drafts that are accepted there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa
import pyarrow.compute as pc

from eagle3x.data import reuse
from eagle3x.data.chat_template import ChatTemplate
from eagle3x.data.conversations import given, prompt_tokens, regenerated
from eagle3x.data.follow_ups import next_turns, turn_ids
from eagle3x.data.leaks import LEAK_WORDS, HeldOut, Why
from eagle3x.data.records import read_prompts
from eagle3x.data.response_parts import ResponseParts
from eagle3x.engines.config import LOGS, Job
from eagle3x.identity import request_seed
from eagle3x.progress import log, track
from eagle3x.types import Completion, EagleError, Prompt, Request, Response, Split

if TYPE_CHECKING:
    from eagle3x.config import Config
    from eagle3x.engines.base import Engine
    from eagle3x.pipeline import StageRun
    from eagle3x.targets import Target


@dataclass(frozen=True)
class Plan:
    """What is to be done with each prompt.

    `too_long`: ids of prompts whose answer has no room in `data.max_sample_tokens`. `shortened`: ids of train prompts
    whose answer gets less room than `sampling.max_new_tokens`.
    """

    requests: Mapping[str, Request]
    given: Sequence[Prompt]
    too_long: Sequence[str]
    shortened: Sequence[str]


def make(run: StageRun) -> dict[str, Any]:
    """Write `responses-{train,val,eval}.parquet` into `run.work`, going on from what is there already.

    Returns facts: per split tokens, how texts end, what was cut or has no label; what was left out; speed.

    Raises:
        EagleError: samples longer than the target's context, a split that would be empty, or an answer that cannot be
            found in the chat template's output.
    """
    cfg, target = run.cfg, run.target
    reused = cfg.responses.source is not None or cfg.hidden_states.source is not None
    prompts = {p.id: p for p in read_prompts(run.inputs["prompts"].path) if not (reused and p.split == "train")}
    template = ChatTemplate(target.tokenizer, cfg.data.chat_template_kwargs)
    slot = run.slot("generate")
    parts = ResponseParts(run.work, rows_per_part=slot.backend.batch_size)
    done = parts.done_ids()
    if done:
        log(f"responses: {len(done)} are there from an earlier attempt")

    work = plan(list(prompts.values()), cfg, target, template)
    _refuse_no_room(work, prompts, cfg, reused)
    taken: dict[str, list[str]] = {}
    for prompt in work.given:
        samples = given(prompt, template, cfg.data.max_sample_tokens, target.eos_token_ids)
        taken[prompt.id] = [response.id for response in samples]
        for response in samples:
            if response.id not in done:
                parts.add(response)
    order = [id for p in prompts.values() for id in (taken.get(p.id) or turn_ids(p))]
    left_out: Counter[Why] = Counter()
    if cfg.responses.source is not None:
        asked_ids = [request.prompt_ids for request in work.requests.values()]
        held_out = HeldOut([p for p in prompts.values() if p.split == "eval"], asked_ids, target.tokenizer)
        for response in reuse.read(Path(cfg.responses.source), target.vocab_size, cfg.data.max_sample_tokens):
            why = held_out.why_not(response.token_ids, response.loss_mask)
            if why is not None:
                left_out[why] += 1
                continue
            order.append(response.id)
            if response.id not in done:
                parts.add(response)
    _refuse_clashes(order)
    too_long, shortened, wanted = list(work.too_long), list(work.shortened), list(work.requests)
    made = {"requests": 0, "tokens": 0, "seconds": 0.0}
    turn, asked = 1, {id: p for id, p in prompts.items() if id not in taken}
    with ExitStack() as stack:
        engine: Engine | None = None
        while asked:
            missing = [r for r in work.requests.values() if r.id not in done]
            if missing and engine is None:
                from eagle3x.engines import adapter

                # How long later turns will be is not known yet.
                known = max(len(r.prompt_ids) + r.max_tokens for r in missing)
                later = any(p.follow_ups for p in asked.values())
                job = Job(cfg.data.max_sample_tokens if later else known, run.work / LOGS)
                engine = stack.enter_context(adapter(slot.backend.name).open(slot, target, cfg.hardware, job))
            if engine is not None and missing:
                tokens, seconds = _write(engine, missing, {p.id: p for p in asked.values()}, parts, cfg, target)
                made = {
                    "requests": made["requests"] + len(missing),
                    "tokens": made["tokens"] + tokens,
                    "seconds": round(made["seconds"] + seconds, 3),
                }
            parts.flush()
            turn += 1
            asked = next_turns(asked, turn, parts, target.tokenizer)
            work = plan(list(asked.values()), cfg, target, template)
            too_long += work.too_long
            shortened += work.shortened
            wanted += work.requests
    _refuse_missing(parts.done_ids(), (*wanted, *(id for ids in taken.values() for id in ids)))
    table = parts.merge({id: place for place, id in enumerate(order)})
    facts = {
        "splits": {split: _counts(table.filter(pc.field("split") == split)) for split in get_args(Split)},
        "too_long": len(too_long),
        "shortened": len(shortened),
        "same_prompt": left_out["same_prompt"],
        "leaks": left_out["leak"],
        "parted": sum(len(ids) > 1 for ids in taken.values()),
        "tokens": sum(len(chunk.flatten()) for chunk in table["token_ids"].chunks),
        "generated": made,
    }
    _report(facts, too_long, shortened)
    return facts


def _write(
    engine: Engine,
    requests: Sequence[Request],
    prompts: Mapping[str, Prompt],
    parts: ResponseParts,
    cfg: Config,
    target: Target,
) -> tuple[int, float]:
    """Have the requests answered; returns tokens and seconds."""
    started, tokens = time.monotonic(), 0
    asked = {request.id: request for request in requests}

    def pace() -> str:
        return f"responses: {tokens} tokens, {tokens / max(time.monotonic() - started, 1e-9):.0f} tok/s"

    for completion in track(engine.generate(requests), pace, len(requests)):
        tokens += len(completion.token_ids)
        parts.add(_response(prompts[completion.id], asked[completion.id], completion, cfg, target.eos_token_ids))
    return tokens, time.monotonic() - started


def plan(prompts: Sequence[Prompt], cfg: Config, target: Target, template: ChatTemplate) -> Plan:
    """Decide, from the lengths of the prompts, what is asked of the engine. Longest first, so that little is padded.

    A val or eval text is never cut, since replay walks all of it: its prompt must leave room for
    `sampling.eval_max_new_tokens` and the continuation. A train text is written as far as there is room.
    """
    limit, sampling = cfg.data.max_sample_tokens, cfg.sampling
    if limit > target.max_position_embeddings:
        raise EagleError(
            f"data.max_sample_tokens={limit} is more than the {target.max_position_embeddings} positions of target"
            f" {target.name}; set it to at most {target.max_position_embeddings}"
        )
    requests: list[Request] = []
    taken: list[Prompt] = []
    too_long: list[str] = []
    shortened: list[str] = []
    for prompt in prompts:
        if prompt.messages[-1].role == "assistant":
            taken.append(prompt)
            continue
        ids = prompt_tokens(prompt, template)
        room = limit - len(ids)
        if prompt.split == "train":
            wanted = sampling.max_new_tokens
            request = Request(
                prompt.id,
                ids,
                min(wanted, room),
                sampling.temperature,
                sampling.top_p,
                request_seed(cfg.seed, prompt.id),
            )
        else:
            wanted = sampling.eval_max_new_tokens + sampling.continuation_tokens
            request = Request(prompt.id, ids, wanted, ignore_eos=True)
        if room < (1 if prompt.split == "train" else wanted):
            too_long.append(prompt.id)
            continue
        if room < wanted:
            shortened.append(prompt.id)
        requests.append(request)
    longest_first = sorted(requests, key=lambda r: -len(r.prompt_ids))
    return Plan({r.id: r for r in longest_first}, taken, too_long, shortened)


def _refuse_no_room(work: Plan, prompts: Mapping[str, Prompt], cfg: Config, reused: bool) -> None:
    left = {*work.requests, *(p.id for p in work.given)}
    for split in get_args(Split):
        if split == "train" and reused:
            continue
        if not any(p.split == split and p.id in left for p in prompts.values()):
            raise EagleError(
                f"no {split} prompt leaves room for an answer in data.max_sample_tokens={cfg.data.max_sample_tokens};"
                " raise it, or lower sampling.eval_max_new_tokens"
            )


def at_stop(
    completion: Completion, max_tokens: int, continuation: int, stop_ids: Collection[int]
) -> tuple[Completion, tuple[int, ...]]:
    """Part a text that was written past its stop: the response, as if it had stopped, and what follows it.

    Greedy text does not depend on where one stops reading it, so one request does for both.
    """
    ids = completion.token_ids
    if len(ids) != max_tokens + continuation:
        raise EagleError(
            f"{completion.id}: the engine wrote {len(ids)} tokens where {max_tokens + continuation} were asked for with"
            " ignore_eos"
        )
    stop = next((i for i, token in enumerate(ids[:max_tokens]) if token in stop_ids), None)
    length = max_tokens if stop is None else stop + 1
    response = replace(completion, token_ids=ids[:length], finish="length" if stop is None else "stop")
    return response, ids[length : length + continuation]


def _response(
    prompt: Prompt, request: Request, completion: Completion, cfg: Config, stop_ids: Collection[int]
) -> Response:
    if prompt.split == "train":
        return regenerated(prompt, request.prompt_ids, completion)
    sampling = cfg.sampling
    written, beyond = at_stop(completion, sampling.eval_max_new_tokens, sampling.continuation_tokens, stop_ids)
    return regenerated(prompt, request.prompt_ids, written, beyond)


def _refuse_clashes(ids: Sequence[str]) -> None:
    clashes = [id for id, count in Counter(ids).items() if count > 1]
    if clashes:
        raise EagleError(f"ids of two samples each: {', '.join(clashes[:5])}; rename one of them")


def _refuse_missing(done: Collection[str], wanted: Sequence[str]) -> None:
    missing = [id for id in wanted if id not in done]
    if missing:
        raise EagleError(f"the engine left {len(missing)} requests unanswered, the first is {missing[0]}")


def _counts(table: pa.Table) -> dict[str, Any]:
    response = table["response_tokens"].to_pylist()
    cut = table["cut_tokens"].to_pylist()
    labelled = [n for n in response if n]
    return {
        "samples": len(labelled),
        "prompt_tokens": sum(table["prompt_tokens"].to_pylist()),
        "response_tokens": sum(response),
        "mean_response_tokens": round(sum(labelled) / len(labelled), 2) if labelled else None,
        "finish": dict(sorted(Counter(table["finish"].to_pylist()).items())),
        "empty_masks": len(response) - len(labelled),
        "cut_samples": sum(n > 0 for n in cut),
        "cut_tokens": sum(cut),
    }


def _report(facts: Mapping[str, Any], too_long: Sequence[str], shortened: Sequence[str]) -> None:
    made = facts["generated"]
    if made["requests"]:
        rate = made["tokens"] / made["seconds"] if made["seconds"] else 0.0
        log(f"responses: {made['tokens']} tokens written in {made['seconds']:.1f} s ({rate:.0f} tok/s)")
    for split, counts in facts["splits"].items():
        if counts["empty_masks"]:
            log(f"responses: {counts['empty_masks']} {split} samples have no label within the limit: left out")
        if counts["cut_samples"]:
            log(f"responses: {counts['cut_samples']} {split} samples were cut, by {counts['cut_tokens']} tokens")
    if facts["same_prompt"]:
        log(f"responses: {facts['same_prompt']} reused texts ask what a val or eval prompt asks: left out")
    if facts["leaks"]:
        log(f"responses: {facts['leaks']} reused texts share {LEAK_WORDS} words in a row with an eval prompt: left out")
    if facts["parted"]:
        log(
            f"responses: {facts['parted']} conversations are one sample per answer: the template rewrites earlier turns"
        )
    if too_long:
        log(f"responses: {len(too_long)} prompts leave no room for an answer: left out, first {too_long[0]}")
    if shortened:
        log(f"responses: {len(shortened)} train answers have less room than sampling.max_new_tokens")
