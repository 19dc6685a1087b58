"""From command-line overrides to a checked `Config`: compose with Hydra, validate, name what is wrong. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from eagle3x.commands.config import COMMANDS, CommandArgs
from eagle3x.config import Config
from eagle3x.types import ConfigError

T = TypeVar("T")
PACKAGED = Path(__file__).parent / "conf"
CONF_DIR = PACKAGED if PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"
"""In a wheel conf/ travels inside the package; in a checkout it is beside it."""


@dataclass(frozen=True)
class Cell:
    """One combination of a matrix: its overrides, its config, and the same as plain values."""

    overrides: tuple[str, ...]
    config: Config
    snapshot: dict[str, Any]
    command: CommandArgs | None


def groups() -> dict[str, list[str]]:
    """Every config group with its choices."""
    folders = sorted(f for f in CONF_DIR.iterdir() if f.is_dir() and f.name != "hydra")
    return {f.name: sorted(y.stem for y in f.glob("*.yaml")) for f in folders}


def cells(overrides: Sequence[str], multirun: bool) -> list[Cell]:
    """Compose and check every cell that `overrides` describe.

    Raises:
        ConfigError: the first thing that is wrong, before any work.
    """
    parsed = _parse(overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR.resolve())):
        try:
            return [cell(c) for c in _combinations(overrides, parsed, multirun)]
        except ConfigError:
            _check_names(parsed)  # names the nearest valid key or choice, which Hydra's message does not
            raise


def _combinations(overrides: Sequence[str], parsed: Sequence[Override], multirun: bool) -> list[Sequence[str]]:
    """The override lists of all cells; an experiment may ask for a multirun and bring its own sweep."""
    fixed = [o.input_line or "" for o in parsed if not (multirun and o.is_sweep_override())]
    hydra = _compose(fixed).hydra
    if not multirun and hydra.mode is None:
        return [overrides]
    named = {o.key_or_group for o in parsed}
    swept = [f"{k}={v}" for k, v in (hydra.sweeper.get("params") or {}).items() if k not in named]
    batches = BasicSweeper.split_arguments(_parse([*swept, *overrides]), max_batch_size=None)
    return [combination for batch in batches for combination in batch]


def cell(overrides: Sequence[str]) -> Cell:
    """Compose one cell; Hydra must be initialised."""
    composed = _compose(overrides)
    with_hydra = OmegaConf.masked_copy(composed, [str(k) for k in composed if k != "hydra"])
    return checked(tuple(overrides), with_hydra)


def checked(overrides: tuple[str, ...], composed: DictConfig) -> Cell:
    """Validate a composed config against the schema."""
    for key, value in _dotted(OmegaConf.to_container(composed, resolve=False), ""):
        if value == "???":
            raise ConfigError(f"{key} has no value: give it, {key}=...")
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as e:
        raise ConfigError(str(e).splitlines()[0]) from e
    name = values.get("command")
    command = None
    if name is not None:
        keys = {f.name for f in fields(COMMANDS[name])}
        command = _validated(COMMANDS[name], {k: values.pop(k) for k in sorted(keys & values.keys())})
    return Cell(overrides, _validated(Config, values), values, command)


def _validated(schema: type[T], values: Mapping[str, Any]) -> T:
    try:
        return TypeAdapter(schema).validate_json(json.dumps(values))
    except ValidationError as e:
        raise ConfigError("\n".join(_explain(dict(error)) for error in e.errors(include_url=False))) from e


def _explain(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "config"
    match error["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"unknown key {where}{_nearest(where, _keys())}"
        case "missing" | "missing_argument":
            return f"{where} is missing"
        case "value_error":
            return f"{where}: {error['ctx']['error']}"
        case "string_type" if isinstance(error["input"], int | float):
            return f"{where}={error['input']}: looks like a number; quote it: '{error['loc'][0]}=[\"...\"]'"
        case _:
            return f"{where}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except HydraException as e:
            reason = str(e).splitlines()[0]
            raise ConfigError(f"cannot read {override!r} as key=value: {reason}") from e
    return parsed


def _compose(overrides: Sequence[str]) -> DictConfig:
    try:
        return compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(" ".join(str(e).split())) from e


def _check_names(overrides: Sequence[Override]) -> None:
    """Misspelled keys and choices, with the nearest valid name; Hydra's own messages offer none."""
    known = groups()
    chosen = [o for o in overrides if o.key_or_group in known and not o.is_sweep_override()]
    for o in overrides:
        key = o.key_or_group
        if key not in known:
            continue
        values = [str(v) for v in o.sweep_string_iterator()] if o.is_sweep_override() else [str(o.value())]
        for value in values:
            if value not in known[key] and value not in ("null", "None"):
                choices = f"{key} is one of {', '.join(known[key])}"
                raise ConfigError(f"{key}={value}: no such choice{_nearest(value, known[key])}; {choices}")
    keys = _keys([o.input_line or "" for o in chosen])
    for o in overrides:
        key = o.key_or_group
        if key in known or key == "hydra" or key.startswith(("hydra.", "hydra/")) or o.is_add() or o.is_force_add():
            continue
        slot, _, group = key.rpartition(".")
        if slot in ("generate", "serve") and group in known:
            raise ConfigError(f"{key} is a slot of group {group}: choose with {group}@{key}={o.value()}")
        if key not in keys and not any(key.startswith(open_dict + ".") for open_dict in OPEN_DICTS):
            raise ConfigError(f"unknown key {key}{_nearest(key, [*known, *keys])}")


OPEN_DICTS = (
    "data.chat_template_kwargs",
    "data.columns",
    "eval.columns",
    "backend.engine_args",
    "generate.backend.engine_args",
    "serve.backend.engine_args",
)


def _keys(chosen: Sequence[str] = ()) -> list[str]:
    composed = OmegaConf.to_container(_compose(chosen), resolve=False)
    return sorted(key for key, _ in _dotted(composed, "") if not key.startswith("hydra"))


def _dotted(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")


def _nearest(name: str, valid: Sequence[str]) -> str:
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    if not close:  # train.epoch is near train.epochs, and so is epochs
        close = [v for v in valid if v.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f" (did you mean {close[0]}?)" if close else ""
