"""Where prompts come from: the builtin set, a JSONL file of the user's, or a dataset. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from eagle3x.data import datasets
from eagle3x.data.config import Data, EvalPrompts
from eagle3x.fingerprint import fingerprint_file
from eagle3x.types import ConfigError, Message

BUILTIN = Path(__file__).parent / "builtin.jsonl"
CHECKED_LINES = 200
"""What `check` reads before any work starts; `read` reads everything."""
SHOWN_PROBLEMS = 10
NO_CATEGORY = "uncategorised"

SourceSplit = Literal["train", "eval"]
"""What a record may name: `val` is always taken from `train`."""

SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
KEYS = {"messages": ("messages",), "sharegpt": ("conversations",), "prompt": ("prompt", "turns")}
"""The keys that a record of each format holds its text under."""


@dataclass(frozen=True)
class Record:
    """One line of a source. `id` and `split` are None where the line names none.

    `messages` begin with an optional system message, then user and assistant take turns. `follow_ups` are user turns
    without answers in between: each is asked after the target's own answer to the one before.
    """

    where: str
    id: str | None
    category: str
    split: SourceSplit | None
    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...]

    @property
    def answered(self) -> bool:
        """Whether it ends with an assistant turn."""
        return self.messages[-1].role == "assistant"


class _WrongError(Exception):
    """What is wrong with one line, and what would be right."""


def read(data: Data | EvalPrompts) -> list[Record]:
    """All records of the source, in file order; none where there is no file (held out of `data`, or magpie).

    Raises:
        ConfigError: some lines are not records; each is named by file and line (the first 10 are shown).
    """
    if data.source in ("held_out", "magpie"):
        return []
    path, name = _file(data)
    records = _records(path, name, data, limit=None)
    if not records:
        raise ConfigError(f"{name} holds no prompts; it should hold one JSON object a line")
    return records


def check(data: Data | EvalPrompts) -> None:
    """Whether the source is there and its first lines are records, before any work starts.

    Raises:
        ConfigError: it is not; the message says where and what would be right.
    """
    if data.source in ("held_out", "magpie"):
        return
    group = "data" if isinstance(data, Data) else "eval"
    if data.source == "hf":
        datasets.check(data, group)
        return
    path, name = _file(data)
    if not path.exists():
        raise ConfigError(f"{group}.path={path} does not exist; name a JSONL file")
    if not path.is_file():
        raise ConfigError(f"{group}.path={path} is not a file; name a JSONL file")
    if not _records(path, name, data, limit=CHECKED_LINES):
        raise ConfigError(f"{group}.path={path} holds no prompts; it should hold one JSON object a line")


def identity(data: Data | EvalPrompts) -> dict[str, Any]:
    """What is hashed of the source: its content, wherever it lies and whatever it is called."""
    if data.source in ("held_out", "magpie"):
        return {}
    return {"records": fingerprint_file(_file(data)[0])}


def origin(data: Data | EvalPrompts) -> dict[str, Any]:
    """What is known of a dataset: where it is from, its commit and its licence. Empty for files."""
    return datasets.rows_of(data).origin if data.source == "hf" else {}


def _file(data: Data | EvalPrompts) -> tuple[Path, str]:
    """The JSONL file that holds the records, and what it is called in messages."""
    if data.source == "hf":
        return datasets.rows_of(data).path, f"{data.hub_id or data.path} {data.split}"
    path = BUILTIN if data.source == "builtin" or data.path is None else Path(data.path)
    return path, str(path)


def _records(path: Path, name: str, data: Data | EvalPrompts, limit: int | None) -> list[Record]:
    records: list[Record] = []
    problems: list[str] = []
    for number, line in _lines(path, limit):
        where = f"{name}:{number}"
        try:
            records.append(_record(line, where, data))
        except _WrongError as e:
            problems.append(f"{where}: {e}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = "\n  ".join(problems[:SHOWN_PROBLEMS]) + (f"\n  and {more} more" if more > 0 else "")
        plural = "1 line is" if len(problems) == 1 else f"{len(problems)} lines are"
        raise ConfigError(f"{plural} no prompt record:\n  {shown}")
    return records


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank. Split at newline bytes only: JSON text may hold other line separators."""
    try:
        with path.open("rb") as f:
            for number, line in islice(enumerate(f, 1), limit):
                if line.strip():
                    yield number, line
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e


def _record(line: bytes, where: str, data: Data | EvalPrompts) -> Record:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise _WrongError(f"not UTF-8 (byte {e.start}); save the file as UTF-8") from e
    except json.JSONDecodeError as e:
        raise _WrongError(f"not JSON ({e.msg} at column {e.colno}); one object a line is right") from e
    except RecursionError as e:
        raise _WrongError("nested too deeply; one flat object a line is right") from e
    if not isinstance(value, dict):
        raise _WrongError(f'a JSON {_kind(value)}; an object is right, such as {{"prompt": "..."}}')
    split = value.get("split")
    if split is not None and split not in get_args(SourceSplit):
        raise _WrongError(f'split is {split!r}; "train" or "eval" is right, or none (val is taken from train)')
    messages, follow_ups = _messages(value, _format(value, data.format))
    record = Record(where, _id(value), _category(value), split, messages, follow_ups)
    if isinstance(data, Data) and data.responses == "given" and not record.answered and split != "eval":
        raise _WrongError("no answer at the end; end with an assistant turn, or set data.responses=regenerate")
    return record


def _format(value: dict[str, Any], configured: str) -> str:
    if configured != "auto":
        if not any(key in value for key in KEYS[configured]):
            raise _WrongError(f"no key {' or '.join(KEYS[configured])}, which data.format={configured} needs")
        return configured
    found = [name for name, keys in KEYS.items() if any(key in value for key in keys)]
    if not found:
        raise _WrongError(f"none of the keys {', '.join(key for keys in KEYS.values() for key in keys)}")
    if len(found) > 1:
        raise _WrongError(f"fits the formats {' and '.join(found)}; choose one by data.format")
    return found[0]


def _messages(value: dict[str, Any], name: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if name == "prompt":
        if "prompt" in value and "turns" in value:
            raise _WrongError("both prompt and turns; keep one")
        turns = value["turns"] if "turns" in value else [value["prompt"]]
        if not isinstance(turns, list) or not turns:
            raise _WrongError('turns is not a list of texts; ["first question", ...] is right')
        texts = [_text(turn, "turns" if "turns" in value else "prompt") for turn in turns]
        return (Message("user", texts[0]),), tuple(texts[1:])
    key = KEYS[name][0]
    turns = value[key]
    if not isinstance(turns, list) or not turns:
        raise _WrongError(f"{key} is not a list of turns")
    messages = tuple(_turn(turn, f"{key}[{i}]", sharegpt=name == "sharegpt") for i, turn in enumerate(turns))
    _check_order(messages, key)
    return messages, ()


def _turn(turn: Any, where: str, sharegpt: bool) -> Message:
    if not isinstance(turn, dict):
        raise _WrongError(f"{where} is a JSON {_kind(turn)}; an object is right")
    # Files named after ShareGPT often hold role and content.
    role_key, text_key = ("from", "value") if sharegpt and "role" not in turn else ("role", "content")
    role = turn.get(role_key)
    known = SHAREGPT_ROLES if sharegpt else {r: r for r in ("system", "user", "assistant")}
    if not isinstance(role, str) or role not in known:
        raise _WrongError(f"{where}.{role_key} is {role!r}; one of {', '.join(known)} is right")
    return Message(known[role], _text(turn.get(text_key), f"{where}.{text_key}"))  # type: ignore[arg-type]


def _check_order(messages: tuple[Message, ...], key: str) -> None:
    first = 1 if messages[0].role == "system" else 0
    if first == len(messages):
        raise _WrongError(f"{key} has no user turn")
    for i, message in enumerate(messages[first:]):
        expected = ("user", "assistant")[i % 2]
        if message.role != expected:
            raise _WrongError(f"{key}[{first + i}] is of {message.role}; here {expected} is right (turns alternate)")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _WrongError(f"{where} is {'missing' if value is None else f'a JSON {_kind(value)}'}; a text is right")
    if not value.strip():
        raise _WrongError(f"{where} is empty; a text is right")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise _WrongError(f"{where} holds half a surrogate pair, which no tokenizer reads; repair the text")
    return value


def _id(value: dict[str, Any]) -> str | None:
    given = value.get("id")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, str | int) or not str(given).strip():
        raise _WrongError(f"id is {given!r}; a text or a whole number is right, or none")
    return str(given)


def _category(value: dict[str, Any]) -> str:
    given = value.get("category")
    if given is None:
        return NO_CATEGORY
    if not isinstance(given, str) or not given.strip():
        raise _WrongError(f"category is {given!r}; a text is right, or none")
    return given


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
