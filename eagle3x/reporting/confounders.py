"""In what two compared cells differ beyond the keys that were swept on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from eagle3x.identity import PLACEMENT

SLOTS = (
    "backend", "quantization", "attention",
    "generate.backend", "generate.quantization", "generate.attention",
    "serve.backend", "serve.quantization", "serve.attention",
)  # fmt: skip
"""Nodes that are told as one, by their name; elsewhere each differing key is told."""
NO_CAUSE = ("tracking", "stage", "command")
"""Nodes that cannot move a figure."""


@dataclass(frozen=True)
class Confounder:
    """A config key in which two cells differ although nobody swept it; `values` in the order of the cells."""

    key: str
    values: tuple[Any, Any]


def swept_keys(overrides: Sequence[Sequence[str]]) -> list[str]:
    """The override keys whose values differ among cells (or that only some cells have), in order of appearance.

    A group in a slot, `backend@serve.backend=vllm`, is the key `serve.backend`.
    """
    maps = [override_map(o) for o in overrides]
    keys = dict.fromkeys(k for m in maps for k in m)
    return [k for k in keys if len({m.get(k) for m in maps}) > 1]


def short_names(overrides: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """Each cell by the values of its swept keys: `vllm, plus_one`; its name where that would not tell it from others.

    A number or a switch keeps the last part of its key: `epochs=3`. A cell alone needs no name.
    """
    if len(names) == 1:
        return ["this run"]
    keys = swept_keys(overrides)
    short = [", ".join(_short(k, m[k]) for k in keys if k in m) for m in map(override_map, overrides)]
    return short if all(short) and len(set(short)) == len(short) else list(names)


def confounders(
    config: Mapping[str, Any], other: Mapping[str, Any], swept: Sequence[str], placement: frozenset[str]
) -> list[Confounder]:
    """Differences between two resolved configs that neither `swept` keys nor placement explain."""
    a, b = dict(_leaves(config, "")), dict(_leaves(other, ""))
    ignored = (*swept, *NO_CAUSE, *placement)
    differing = [k for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k) and not _below(k, ignored)]
    slots = [s for s in SLOTS if any(_below(k, (s,)) for k in differing)]
    found = [Confounder(s, (_name(config, s), _name(other, s))) for s in slots]
    named = [c for c in found if c.values[0] != c.values[1]]
    told = tuple(c.key for c in named)
    return named + [Confounder(k, (a.get(k), b.get(k))) for k in differing if not _below(k, told)]


def placement_paths(schema: type, prefix: str = "") -> frozenset[str]:
    """Dotted paths of all fields of a config schema that are placement: where work is done, not what comes out."""
    hints = get_type_hints(schema, include_extras=True)
    found: set[str] = set()
    for f in fields(schema):
        hint = hints[f.name]
        if PLACEMENT in getattr(hint, "__metadata__", ()):
            found.add(prefix + f.name)
        elif is_dataclass(hint) and isinstance(hint, type):
            found |= placement_paths(hint, f"{prefix}{f.name}.")
    return frozenset(found)


def override_map(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides by key; a group in a slot, `backend@serve.backend=vllm`, has the key `serve.backend`."""
    pairs = (o.lstrip("+~").partition("=") for o in overrides)
    return {key.rpartition("@")[2].replace("/", "."): value for key, _, value in pairs}


def _short(key: str, value: str) -> str:
    return (
        value
        if value.replace("_", "").isalpha() and value not in ("true", "false", "null")
        else f"{key.rpartition('.')[2]}={value}"
    )


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _below(key: str, nodes: Sequence[str]) -> bool:
    return any(key == n or key.startswith(n + ".") for n in nodes)


def _name(config: Mapping[str, Any], slot: str) -> Any:
    node: Any = config
    for part in slot.split("."):
        node = node.get(part, {}) if isinstance(node, Mapping) else {}
    return node.get("name", node.get("scheme")) if isinstance(node, Mapping) else node
