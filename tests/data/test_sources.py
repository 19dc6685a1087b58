"""Prompt sources: what the builtin set promises, and what is said of lines that are no records."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eagle3x.data import sources
from eagle3x.data.config import Data
from eagle3x.data.sources import Record
from eagle3x.targets import Target
from eagle3x.types import ConfigError, Message

BUILTIN = Data(
    source="builtin", path=None, hub_id=None, revision=None, subset=None, split=None,
    rows=None, columns={}, format="auto", responses="regenerate", limit_train=None, limit_eval=None,
    val_fraction=0.125, eval_fraction=0.25, max_sample_tokens=512, chat_template_kwargs={}, magpie=None,
)  # fmt: skip


def jsonl(path: Path, *lines: Any, **overrides: Any) -> Data:
    """A file of these lines (texts as they are, all else as JSON), and the config that reads it."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    values = {
        "source": "jsonl", "path": str(path), "hub_id": None, "revision": None, "subset": None, "split": None,
        "rows": None, "columns": {}, "format": "auto", "responses": "regenerate", "limit_train": None,
        "limit_eval": None, "val_fraction": 0.25, "eval_fraction": 0.25, "max_sample_tokens": 64,
        "chat_template_kwargs": {}, "magpie": None,
    }  # fmt: skip
    return Data(**{**values, **overrides})


def one(path: Path, line: Any, **overrides: Any) -> Record:
    (record,) = sources.read(jsonl(path / "prompts.jsonl", line, **overrides))
    return record


def test_builtin_is_even_and_large_enough() -> None:
    records = sources.read(BUILTIN)
    by_split = {s: Counter(r.category for r in records if r.split == s) for s in ("train", "eval")}
    assert len(by_split["train"]) == 8
    assert set(by_split["train"].values()) == {26}
    assert by_split["eval"].keys() == by_split["train"].keys()
    assert set(by_split["eval"].values()) == {6}
    assert len(records) == 8 * 32
    assert len({r.id for r in records}) == len(records)
    assert not any(r.answered for r in records)
    assert sum(len(r.messages) > 1 for r in records if r.split == "train") >= 3


def token_grams(text: str, tokenizer: Any, n: int) -> set[tuple[int, ...]]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)}


def test_builtin_train_and_eval_share_no_8_tokens(smollm2: Target) -> None:
    grams: dict[str | None, set[tuple[int, ...]]] = {"train": set(), "eval": set()}
    for record in sources.read(BUILTIN):
        for message in record.messages:
            grams[record.split] |= token_grams(message.content, smollm2.tokenizer, 8)
    assert len(grams["train"]) > 1000
    assert len(grams["eval"]) > 200
    assert not grams["train"] & grams["eval"]
    # The same check finds a planted overlap.
    planted = "And now: " + next(r.messages[0].content for r in sources.read(BUILTIN) if r.id == "math-eval-05")
    assert token_grams(planted, smollm2.tokenizer, 8) & grams["eval"]


def test_builtin_prompts_are_short(smollm2: Target) -> None:
    lengths = [sum(len(smollm2.tokenizer(m.content)["input_ids"]) for m in r.messages) for r in sources.read(BUILTIN)]
    assert min(lengths) >= 4
    assert max(lengths) <= 60


def test_prompt_format(tmp_path: Path) -> None:
    record = one(tmp_path, {"prompt": "Hi", "id": 7, "category": "greeting", "split": "eval", "extra": [1]})
    assert record == Record(
        f"{tmp_path}/prompts.jsonl:1", "7", "greeting", "eval", (Message("user", "Hi"),), follow_ups=()
    )


def test_turns_after_the_first_are_follow_ups(tmp_path: Path) -> None:
    record = one(tmp_path, {"turns": ["First?", "Second?", "Third?"]})
    assert record.messages == (Message("user", "First?"),)
    assert record.follow_ups == ("Second?", "Third?")
    assert record.id is None
    assert record.split is None
    assert record.category == "uncategorised"


def test_messages_format(tmp_path: Path) -> None:
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    record = one(tmp_path, {"messages": [{"role": r, "content": c} for r, c in turns]})
    assert record.messages == tuple(Message(r, c) for r, c in turns)  # type: ignore[arg-type]
    assert not record.answered


@pytest.mark.parametrize("name", ["auto", "sharegpt"])
def test_sharegpt_format(tmp_path: Path, name: str) -> None:
    turns = [{"from": "system", "value": "S"}, {"from": "human", "value": "H"}, {"from": "gpt", "value": "G"}]
    record = one(tmp_path, {"conversations": turns}, format=name)
    assert record.messages == (Message("system", "S"), Message("user", "H"), Message("assistant", "G"))
    assert record.answered


def test_sharegpt_with_role_and_content(tmp_path: Path) -> None:
    record = one(tmp_path, {"conversations": [{"role": "user", "content": "H"}, {"role": "assistant", "content": "G"}]})
    assert record.messages == (Message("user", "H"), Message("assistant", "G"))


def test_auto_decides_line_by_line(tmp_path: Path) -> None:
    data = jsonl(
        tmp_path / "mixed.jsonl",
        {"prompt": "a"},
        "",
        {"messages": [{"role": "user", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "c"}]},
    )
    records = sources.read(data)
    assert [r.messages[0].content for r in records] == ["a", "b", "c"]
    assert [r.where.rsplit(":")[-1] for r in records] == ["1", "3", "4"]


def test_a_byte_order_mark_and_a_line_separator_in_a_text_are_no_line_ends(tmp_path: Path) -> None:
    record = one(tmp_path, '\ufeff{"prompt": "one\u2028two"}')
    assert record.messages[0].content == "one\u2028two"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "a JSON array; an object is right"),
        ("3", "a JSON number"),
        ({"text": "x"}, "none of the keys messages, conversations, prompt, turns"),
        ({"prompt": "x", "messages": []}, "fits the formats messages and prompt; choose one by data.format"),
        ({"prompt": "x", "turns": ["y"]}, "both prompt and turns"),
        ({"prompt": "  "}, "prompt is empty"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": ["x"]}, "prompt is a JSON array; a text is right"),
        ({"turns": "x"}, "turns is not a list"),
        ({"turns": ["x", 3]}, "turns is a JSON number"),
        ({"prompt": "\ud800"}, "prompt holds half a surrogate pair"),
        ({"prompt": "x", "split": "test"}, 'split is \'test\'; "train" or "eval" is right'),
        ({"prompt": "x", "id": 1.5}, "id is 1.5"),
        ({"prompt": "x", "category": ""}, "category is ''"),
        ({"messages": []}, "messages is not a list of turns"),
        ({"messages": ["x"]}, "messages[0] is a JSON string; an object is right"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role is 'bot'; one of system, user, assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing; a text is right"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages has no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0] is of assistant; here user is right"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]},
            "messages[1] is of user; here assistant is right",
        ),
        ({"conversations": [{"from": "tool", "value": "x"}]}, "conversations[0].from is 'tool'; one of system, human"),
        ({"conversations": [{"from": "human", "content": "x"}]}, "conversations[0].value is missing"),
    ],
)
def test_bad_lines_say_what_would_be_right(tmp_path: Path, line: Any, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    data = jsonl(path, {"prompt": "fine"}, line)
    with pytest.raises(ConfigError) as e:
        sources.read(data)
    assert f"{path}:2: {said}" in str(e.value)
    assert str(e.value).startswith("1 line is no prompt record")


def test_a_configured_format_does_not_guess(tmp_path: Path) -> None:
    data = jsonl(
        tmp_path / "a.jsonl", {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, format="messages"
    )
    assert sources.read(data)[0].messages == (Message("user", "y"),)
    data = jsonl(tmp_path / "b.jsonl", {"prompt": "x"}, format="messages")
    with pytest.raises(ConfigError, match=r"b.jsonl:1: no key messages, which data.format=messages needs"):
        sources.read(data)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:1: not UTF-8 \(byte 15\)"):
        sources.read(data)


def test_given_needs_an_answer_except_for_eval(tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    data = jsonl(
        tmp_path / "a.jsonl",
        {"messages": [question, answer]},
        {"messages": [question], "split": "eval"},
        {"messages": [question]},
        {"prompt": "Q"},
        responses="given",
    )
    with pytest.raises(ConfigError) as e:
        sources.read(data)
    assert str(e.value).startswith("2 lines are no prompt record")
    assert f"{tmp_path}/a.jsonl:3: no answer at the end" in str(e.value)
    assert f"{tmp_path}/a.jsonl:4: no answer at the end" in str(e.value)


def test_ten_problems_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", *["oops"] * 13)
    with pytest.raises(ConfigError) as e:
        sources.read(data)
    assert str(e.value).startswith("13 lines are no prompt record")
    assert str(e.value).count("not JSON") == 10
    assert str(e.value).endswith("and 3 more")


def test_check_names_a_missing_path_and_a_directory(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    sources.check(data)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"data.path=.*a.jsonl does not exist; name a JSONL file"):
        sources.check(data)
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"data.path=.*a.jsonl is not a file"):
        sources.check(data)


def test_check_reads_the_first_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a.jsonl:2: not JSON"):
        sources.check(jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, "oops"))
    with pytest.raises(ConfigError, match=r"b.jsonl holds no prompts"):
        sources.check(jsonl(tmp_path / "b.jsonl", ""))
    sources.check(BUILTIN)


def test_identity_is_the_content_wherever_it_lies(tmp_path: Path) -> None:
    a = jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    b = jsonl(tmp_path / "b.jsonl", {"prompt": "x"})
    other = jsonl(tmp_path / "c.jsonl", {"prompt": "y"})
    assert sources.identity(a) == sources.identity(b)
    assert sources.identity(a) != sources.identity(other)
    assert sources.identity(BUILTIN) != sources.identity(a)


def test_a_template_variable_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot set tools: eagle3x sets them"):
        jsonl(tmp_path / "x.jsonl", {"prompt": "a"}, chat_template_kwargs={"tools": "x", "enable_thinking": True})
