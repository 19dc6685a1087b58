"""`command=artifacts`: what is in the store, why two keys differ, and making room."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from eagle3x.artifacts import Entry, Store
from eagle3x.commands.config import ArtifactsArgs
from eagle3x.explanation import Explanation
from eagle3x.manifest import Manifest
from eagle3x.payload import show_bytes
from eagle3x.types import ConfigError, EagleError

SHOWN_KEY = 12
GIB = 1024**3
STATE_STYLE = {"complete": "green", "partial": "yellow", "dropped": "dim", "damaged": "bold red"}


def run(store: Store, args: ArtifactsArgs, console: Console) -> None:
    """Print what was asked for. ConfigError for the wrong number of keys, or for keys that name no artifact."""
    keys = args.keys
    if args.action in ("list", "clean") and keys:
        raise ConfigError(f"action={args.action} takes no keys: action=drop does")
    if args.action != "clean" and (args.older_than_days, args.keep_gib, args.dry_run) != (None, None, False):
        raise ConfigError("older_than_days, keep_gib and dry_run are of action=clean")
    match args.action:
        case "list":
            _list(store, console)
        case "clean":
            _clean(store, args, console)
        case "drop":
            if not keys:
                raise ConfigError(
                    "action=drop needs the keys of what to drop: 'keys=[\"<key>\"]'; action=list shows them"
                )
            _drop(store, keys, console)
        case "explain" if len(keys) == 1:
            _explain_one(store, keys[0], console)
        case "explain" if len(keys) == 2:
            _explain_two(store.explain(*keys), console)
        case _:
            raise ConfigError(
                f'action=explain needs one key, or two to compare, not {len(keys)}: \'keys=["<a>","<b>"]\''
            )


def to_clean(
    entries: Sequence[Entry], now: float, older_than_days: float | None, keep_gib: float | None
) -> list[Entry]:
    """What to drop, longest unused first: all that was not used for so long, then more until so much is left.

    `now`: seconds since the epoch. Only what takes room is looked at.
    """
    by_use = sorted((e for e in entries if e.bytes and e.state != "dropped"), key=lambda e: e.used)
    left = sum(e.bytes for e in by_use)
    chosen: list[Entry] = []
    for entry in by_use:
        old = older_than_days is not None and now - entry.used > older_than_days * 86400
        too_much = keep_gib is not None and left > keep_gib * GIB
        if old or too_much:
            chosen.append(entry)
            left -= entry.bytes
    return chosen


def _list(store: Store, console: Console) -> None:
    entries = store.entries()
    if not entries:
        console.print(f"no artifacts in {store.root}", soft_wrap=True)
        return
    table = Table("stage", "key", "started", caption=f"{show_bytes(sum(e.bytes for e in entries))} in {store.root}")
    for name in ("size", "wall time"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for e in entries:
        table.add_row(e.stage, e.key[:SHOWN_KEY], _when(e), show_bytes(e.bytes), _wall(e), _state(e))
    console.print(table)


def _clean(store: Store, args: ArtifactsArgs, console: Console) -> None:
    if args.older_than_days is None and args.keep_gib is None:
        raise ConfigError(
            "action=clean needs older_than_days=N (since its last use), keep_gib=N (in the store), or both"
        )
    chosen = to_clean(store.entries(), time.time(), args.older_than_days, args.keep_gib)
    if not chosen:
        console.print(f"nothing to clean in {store.root}", soft_wrap=True)
    for entry in chosen:
        if args.dry_run:
            console.print(Text(f"would drop {show_bytes(entry.bytes)}: {entry.stage} {entry.key}"), soft_wrap=True)
            continue
        try:
            _drop(store, [entry.key], console)
        except EagleError as error:  # a run is making it
            console.print(Text(f"kept: {error}"), soft_wrap=True)


def _drop(store: Store, keys: Sequence[str], console: Console) -> None:
    for e in store.drop(keys):
        freed = "nothing was left to drop of" if e.state == "dropped" else f"dropped {show_bytes(e.bytes)}:"
        console.print(Text(f"{freed} {e.stage} {e.key}"), soft_wrap=True)


def _explain_one(store: Store, prefix: str, console: Console) -> None:
    entry = store.find(prefix)
    if entry.manifest is None:
        raise ConfigError(f"{entry.stage} {entry.key} has no readable manifest: nothing is known of it")
    m = entry.manifest
    console.print(Text.assemble(f"{m.stage} {m.key}, version {m.version}, ", _state(entry)), soft_wrap=True)
    made_with = ", ".join(f"{name} {number}" for name, number in m.packages.items())
    revision = f"git {m.git.revision[:12]}{' with changes' if m.git.dirty else ''}, " if m.git else ""
    console.print(Text(f"started {_when(entry)}, took {_wall(entry)}; {revision}{made_with}"), soft_wrap=True)
    for title, values in (("identity", m.identity), ("facts", m.facts)):
        table = Table(title, "value", show_edge=False)
        for path, value in _flat(values):
            table.add_row(Text(path), Text(_value(value)))
        if values:
            console.print(table)
    tree = Tree("parents" if m.parents else "no parents")
    _grow(tree, m, store)
    console.print(tree)


def _grow(tree: Tree, manifest: Manifest, store: Store) -> None:
    for stage, key in manifest.parents.items():
        parent = store.manifest(stage, key)
        branch = tree.add(Text(f"{stage} {key}" + ("" if parent else " (its manifest is gone)")))
        if parent is not None:
            _grow(branch, parent, store)


def _explain_two(explanation: Explanation, console: Console) -> None:
    e = explanation
    if e.key_a == e.key_b:
        console.print(Text(f"{e.stage} {e.key_a}: both keys name the same artifact"), soft_wrap=True)
        return
    causes = _causes(e)
    if not causes:
        console.print(
            Text(f"{e.stage} {e.key_a} and {e.key_b} differ in nothing that may be shown: in a masked value, such as"
                 " a password in the engine's arguments"),
            soft_wrap=True,
        )  # fmt: skip
        return
    first = causes[0][0]
    console.print(Text(f"{e.stage} {e.key_a} -> {e.key_b}: the first difference is in {first.stage}"), soft_wrap=True)
    for node, lines in causes:
        console.print(Text(f"{node.stage} {node.key_a} -> {node.key_b}", style="bold"), soft_wrap=True)
        for line in lines:
            console.print(Text(f"  {line}"), soft_wrap=True)


def _causes(explanation: Explanation) -> list[tuple[Explanation, list[str]]]:
    """Stages with differences of their own, first causes first; what a parent already said is not said again."""
    said: set[str] = set()
    causes: list[tuple[Explanation, list[str]]] = []
    for node in explanation.upstream_first():
        lines = [f"{d.path}: {_value(d.a)} -> {_value(d.b)}" for d in node.differences]
        # A version belongs to its stage; an identity value, e.g. the target's weights, is the same in all.
        new = [line for line in lines if line not in said or line.startswith("version:")]
        said.update(lines)
        if new:
            causes.append((node, new))
    return causes


def _flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from _flat(value, f"{path}.{name}" if path else name)
    else:
        yield path, values


def _value(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _state(entry: Entry) -> Text:
    return Text(entry.state, style=STATE_STYLE[entry.state])


def _when(entry: Entry) -> str:
    if entry.manifest is None:
        return "?"
    return f"{datetime.fromisoformat(entry.manifest.started).astimezone():%Y-%m-%d %H:%M}"


def _wall(entry: Entry) -> str:
    if entry.manifest is None:
        return "?"
    minutes, seconds = divmod(entry.manifest.wall_seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {int(seconds):02d} s" if minutes else f"{seconds:.1f} s"
