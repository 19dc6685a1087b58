r"""Prompts that the target writes itself: it continues the header of a user's turn (Magpie, arXiv:2406.08464).

An instruct model that is given `<|im_start|>user\n` and nothing more writes what a user might ask, and ends the turn.
Header and end are the chat template's: what it writes before and after a user's text.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3x.data.chat_template import ChatTemplate
from eagle3x.data.config import Magpie
from eagle3x.data.response_parts import ResponseParts
from eagle3x.data.sources import NO_CATEGORY, Record
from eagle3x.engines.config import LOGS, Job
from eagle3x.identity import request_seed
from eagle3x.progress import log, track
from eagle3x.types import EagleError, Message, Request, Response

if TYPE_CHECKING:
    from eagle3x.pipeline import StageRun

PLACE = "WHAT-THE-USER-WRITES"


@dataclass(frozen=True)
class Drawn:
    """Prompts, how many draws were left out and why, and the draws on disk (dropped once the prompts are)."""

    records: list[Record]
    counts: dict[str, int]
    parts: ResponseParts


@dataclass(frozen=True)
class UserTurn:
    """Token ids before a user's text, and the one that ends it."""

    header: tuple[int, ...]
    end: int


def write(run: StageRun) -> Drawn:
    """Have `data.magpie.draws` prompts written by the generate slot's engine, going on from what is there already.

    Raises:
        EagleError: the template does not end a user's turn with a token of its own, or no draw is a prompt.
    """
    cfg, target = run.cfg, run.target
    asked = cfg.data.magpie
    if asked is None:
        raise ValueError("data=magpie has data.magpie")
    turn = user_turn(ChatTemplate(target.tokenizer, cfg.data.chat_template_kwargs))
    slot = run.slot("generate")
    parts = ResponseParts(run.work, rows_per_part=slot.backend.batch_size)
    ids = [f"magpie-{i:06d}" for i in range(asked.draws)]
    done = parts.done_ids()
    missing = [
        Request(id, turn.header, asked.max_tokens, asked.temperature, asked.top_p, request_seed(cfg.seed, id))
        for id in ids
        if id not in done
    ]
    if missing:
        from eagle3x.engines import adapter

        job = Job(len(turn.header) + asked.max_tokens, run.work / LOGS)
        with adapter(slot.backend.name).open(slot, target, cfg.hardware, job) as engine:
            started, tokens = time.monotonic(), 0

            def pace() -> str:
                return f"magpie: {tokens} tokens, {tokens / max(time.monotonic() - started, 1e-9):.0f} tok/s"

            for completion in track(engine.generate(missing), pace, len(missing)):
                tokens += len(completion.token_ids)
                parts.add(_kept(completion.id, completion.token_ids))
        parts.flush()
    written = parts.responses(ids)
    records, counts = filtered([(id, written[id].token_ids) for id in ids], turn, asked, target.tokenizer)
    log(f"magpie: {len(records)} prompts of {asked.draws} draws; left out: {counts}")
    if not records:
        raise EagleError(f"none of {asked.draws} draws is a prompt ({counts}): is {target.name} an instruct model?")
    return Drawn(records, counts, parts)


def user_turn(template: ChatTemplate) -> UserTurn:
    """What the template writes around a user's text. EagleError if no token of its own ends it."""
    text = template.text([Message("user", PLACE)], "magpie", header=True)
    before, found, after = text.partition(PLACE)
    if not found or PLACE in after:
        raise EagleError("the chat template does not write a user's text once, as it is: magpie finds no header")
    encode = template.tokenizer
    first = encode(after, add_special_tokens=False)["input_ids"][:1]
    if not first or first[0] not in encode.get_added_vocab().values():
        raise EagleError(
            f"the chat template ends a user's turn with {after[:40]!r}, which begins with no special token: where a"
            " prompt ends could not be told"
        )
    return UserTurn(tuple(encode(before, add_special_tokens=False)["input_ids"]), first[0])


def filtered(
    draws: Sequence[tuple[str, Sequence[int]]], turn: UserTurn, asked: Magpie, tokenizer: Any
) -> tuple[list[Record], dict[str, int]]:
    """The draws that end like a user's turn, are long enough, hold no other special token and were not there before."""
    special = set(tokenizer.all_special_ids)
    left_out = Counter({"no_end": 0, "special": 0, "short": 0, "duplicate": 0})
    texts: set[str] = set()
    records: list[Record] = []
    for id, token_ids in draws:
        ids = list(token_ids)
        prompt = ids[: ids.index(turn.end)] if turn.end in ids else None
        text = "" if prompt is None else tokenizer.decode(prompt, skip_special_tokens=True).strip()
        words = " ".join(text.split())
        if prompt is None:
            left_out["no_end"] += 1
        elif special & set(prompt):
            left_out["special"] += 1
        elif len(prompt) < asked.min_tokens or not words:
            left_out["short"] += 1
        elif words in texts:
            left_out["duplicate"] += 1
        else:
            texts.add(words)
            records.append(Record(id, id, NO_CATEGORY, None, (Message("user", text),), ()))
    return records, dict(left_out)


def _kept(id: str, token_ids: Sequence[int]) -> Response:
    """A draw in the form that parts have on disk."""
    return Response(id, NO_CATEGORY, "train", tuple(token_ids), (False,) * len(token_ids), 0, len(token_ids), "given")
