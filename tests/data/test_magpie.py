"""The target's own prompts: what is asked, where a user's turn ends, and what is left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3x.composition import cells
from eagle3x.data import magpie, prompts
from eagle3x.data.chat_template import ChatTemplate
from eagle3x.data.config import Magpie
from eagle3x.data.magpie import UserTurn
from eagle3x.data.records import read_prompts
from eagle3x.data.response_parts import ResponseParts
from eagle3x.pipeline import StageRun, declared
from eagle3x.stage_identity import identities
from eagle3x.stage_view import View
from eagle3x.targets import Target
from eagle3x.types import EagleError

START, END = 1, 2  # <|im_start|>, <|im_end|>
SMALL = (
    "data=magpie",
    "data.magpie.draws=48",
    "data.magpie.max_tokens=100",
    "data.magpie.min_tokens=2",
    "generate.backend.batch_size=48",
)


def config(*overrides: str) -> Any:
    return cells([*SMALL, *overrides], multirun=False)[0].config


def stage(work: Path, target: Target, *overrides: str) -> StageRun:
    work.mkdir(parents=True, exist_ok=True)
    cfg = config(*overrides)
    nodes = declared("prompts", cfg)
    view = View.of(cfg, (*nodes.identity, *nodes.placement), "prompts")
    return StageRun(view, work, {}, target, {"generate": cfg.generate_slot})


def test_header_and_end_are_the_templates(tiny_target: Target) -> None:
    tokenizer = tiny_target.tokenizer
    turn = magpie.user_turn(ChatTemplate(tokenizer, {}))
    assert tokenizer.convert_ids_to_tokens(turn.header) == ["<|im_start|>", *"user", "\n"]
    assert turn.end == END


def test_a_turn_that_ends_with_plain_text_is_refused(tiny_target: Target) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target.path)
    tokenizer.chat_template = "{% for m in messages %}USER: {{ m.content }} {% endfor %}ASSISTANT:"
    with pytest.raises(EagleError, match="ends a user's turn with ' ASSISTANT:', which begins with no special token"):
        magpie.user_turn(ChatTemplate(tokenizer, {}))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content | upper", "m.content | length")
    with pytest.raises(EagleError, match="does not write a user's text once"):
        magpie.user_turn(ChatTemplate(tokenizer, {}))


def test_what_is_left_out(tiny_target: Target) -> None:
    tokenizer = tiny_target.tokenizer

    def ids(text: str, *more: int) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], *more]

    draws = [
        ("a", ids("What is it?", END)),
        ("b", ids("What goes on and on")),  # no end
        ("c", ids("x", END)),
        ("d", ids("What  is it? ", END)),  # the same but for white space
        ("e", [*ids("ab"), START, *ids("cd", END)]),
        ("f", ids("    ", END)),
        ("g", ids("Go on", END, *ids("not read"))),  # an engine that did not stop there
    ]
    asked = Magpie(draws=7, temperature=1.0, top_p=1.0, min_tokens=2, max_tokens=20)
    records, counts = magpie.filtered(draws, UserTurn((1,), END), asked, tokenizer)
    assert [(r.id, r.messages[0].content) for r in records] == [("a", "What is it?"), ("g", "Go on")]
    assert counts == {"no_end": 1, "special": 1, "short": 2, "duplicate": 1}


def test_prompts_are_sampled_by_seed_and_a_killed_run_goes_on(tmp_path: Path, tiny_target: Target) -> None:
    facts = prompts.make(stage(tmp_path / "a", tiny_target))
    first = read_prompts(tmp_path / "a")
    assert len(first) == sum(s["prompts"] for s in facts["splits"].values()) >= 3
    assert len(first) + facts["duplicates"] + facts["leaks"] + sum(facts["magpie"].values()) == 48
    assert [p.name for p in (tmp_path / "a").iterdir() if p.suffix] == ["prompts.parquet"]
    assert not (tmp_path / "a" / "parts").exists()

    prompts.make(stage(tmp_path / "b", tiny_target))
    assert read_prompts(tmp_path / "b") == first
    prompts.make(stage(tmp_path / "c", tiny_target, "seed=2"))
    assert {p.messages for p in read_prompts(tmp_path / "c")}.isdisjoint({p.messages for p in first})

    resumed = stage(tmp_path / "d", tiny_target)
    parts = ResponseParts(resumed.work, rows_per_part=1)
    ids = tiny_target.tokenizer("kept from before", add_special_tokens=False)["input_ids"]
    parts.add(magpie._kept("magpie-000003", [*ids, END]))
    prompts.make(resumed)
    assert {p.id: p.messages[0].content for p in read_prompts(tmp_path / "d")}["magpie-000003"] == "kept from before"


def test_the_key_knows_who_wrote_them(tiny_target: Target) -> None:
    def nodes(*overrides: str) -> dict[str, Any]:
        cfg = cells(overrides, multirun=False)[0].config
        return identities("prompts", declared("prompts", cfg).identity, cfg, tiny_target)

    assert set(nodes()) == {"data", "eval"}
    assert set(nodes(*SMALL)) == {"data", "eval", "target", "generate", "seed"}
    assert nodes(*SMALL)["data"] != nodes(*SMALL, "data.magpie.temperature=0.5")["data"]
    assert SimpleNamespace(**nodes(*SMALL, "seed=7")).seed == 7
