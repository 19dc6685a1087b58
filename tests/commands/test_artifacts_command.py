"""`command=artifacts` as its user sees it."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3x.artifacts import Artifact, ArtifactSpec, Store
from eagle3x.commands import artifacts
from eagle3x.commands.config import ArtifactsArgs
from eagle3x.types import ConfigError, EagleError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "artifacts")


def make(store: Store, stage: str, identity: dict[str, Any], version: int = 1, **parents: Artifact) -> Artifact:
    def write(work: Path) -> dict[str, Any]:
        (work / "payload").write_bytes(b"x" * 10240)
        return {"tokens": 12}

    return store.get_or_make(ArtifactSpec(stage, version, identity, parents, {}), write)


def say(store: Store, action: Any, *keys: str, width: int = 100, **clean: Any) -> list[str]:
    out = io.StringIO()
    wanted: dict[str, Any] = {"older_than_days": None, "keep_gib": None, "dry_run": False, **clean}
    artifacts.run(store, ArtifactsArgs("artifacts", action, keys, **wanted), Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_list(store: Store) -> None:
    prompts = make(store, "prompts", {"seed": 1})
    responses = make(store, "responses", {}, prompts=prompts)
    broken = make(store, "responses", {"seed": 2}, prompts=prompts)
    store.drop([prompts.key])
    (broken.path / "payload").unlink()

    def fail(work: Path) -> dict[str, Any]:
        (work / "piece").write_bytes(b"x" * 2048)
        raise RuntimeError

    spec = ArtifactSpec("drafter", 1, {}, {}, {})
    with pytest.raises(RuntimeError):
        store.get_or_make(spec, fail)
    rows = [cells(line) for line in say(store, "list") if line.startswith("│")]
    by_key = {row[1]: (row[0], row[3], row[5]) for row in rows}
    size = f"{(10240 + (responses.path / 'manifest.json').stat().st_size) / 1024:.1f} KiB"
    left = f"{(broken.path / 'manifest.json').stat().st_size / 1024:.1f} KiB"
    assert by_key == {
        spec.key[:12]: ("drafter", "2.0 KiB", "partial"),
        prompts.key[:12]: ("prompts", "0 B", "dropped"),
        responses.key[:12]: ("responses", size, "complete"),
        broken.key[:12]: ("responses", left, "damaged"),
    }
    assert all(row[2][:2] == "20" for row in rows), "a year"


def test_list_of_an_empty_store(store: Store) -> None:
    assert say(store, "list", width=400) == [f"no artifacts in {store.root}"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.04, "0.0 s"), (59.94, "59.9 s"), (61.2, "1 min 01 s"), (3725.0, "1 h 02 min")]
)
def test_wall_time(store: Store, seconds: float, shown: str) -> None:
    path = make(store, "prompts", {}).path / "manifest.json"
    text = path.read_text()
    at = text.index('"wall_seconds": ') + len('"wall_seconds": ')
    path.write_text(text[:at] + str(seconds) + text[text.index(",", at) :])
    assert [cells(line)[4] for line in say(store, "list") if line.startswith("│")] == [shown]


def test_explain_two_names_the_first_cause_once(store: Store) -> None:
    def chain(weights: str, lr: float) -> Artifact:
        target = {"target": {"weights": weights}}
        states = make(store, "hidden_states", target)
        drafter = make(store, "drafter", target | {"train": {"lr": lr}}, hidden_states=states)
        return make(store, "export", target, drafter=drafter)

    a, b = chain("aa", 0.1), chain("bb", 0.2)
    lines = say(store, "explain", a.key[:10], b.key[:10])
    assert lines[0] == f"export {a.key} -> {b.key}: the first difference is in hidden_states"
    assert [line for line in lines[1:] if line.startswith("  ")] == [
        "  identity.target.weights: aa -> bb",
        "  identity.train.lr: 0.1 -> 0.2",
    ]
    assert [line.split()[0] for line in lines[1:] if not line.startswith("  ")] == ["hidden_states", "drafter"]


def test_explain_two_versions_in_a_row(store: Store) -> None:
    """The same words in two stages are two differences."""
    a = make(store, "export", {}, drafter=make(store, "drafter", {}))
    b = make(store, "export", {}, 2, drafter=make(store, "drafter", {}, 2))
    assert [line for line in say(store, "explain", a.key, b.key) if "version" in line] == ["  version: 1 -> 2"] * 2


def test_explain_two_of_the_same(store: Store) -> None:
    key = make(store, "prompts", {}).key
    assert say(store, "explain", key, key) == [f"prompts {key}: both keys name the same artifact"]


def test_explain_two_that_differ_in_a_secret(store: Store) -> None:
    a, b = (make(store, "prompts", {"engine_args": {"api_key": key}}) for key in ("hunter2", "hunter3"))
    said = " ".join(say(store, "explain", a.key, b.key))
    assert "masked value" in said
    assert "hunter" not in said


def test_explain_one(store: Store) -> None:
    prompts = make(store, "prompts", {"data": {"source": "[red]builtin[/red]", "none": {}}})
    responses = make(store, "responses", {"sampling": {"temperature": 0.7}}, prompts=prompts)
    lines = say(store, "explain", responses.key[:8])
    assert lines[0] == f"responses {responses.key}, version 1, complete"
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    assert ["sampling.temperature", "0.7"] in rows
    assert ["tokens", "12"] in rows
    assert any(line.endswith(f"── prompts {prompts.key}") for line in lines)
    lines = say(store, "explain", prompts.key)
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    assert ["data.source", "[red]builtin[/red]"] in rows, "values are not markup"
    assert ["data.none", "{}"] in rows
    assert lines[-1] == "no parents"


def test_drop(store: Store) -> None:
    made = make(store, "prompts", {})
    size = 10240 + (made.path / "manifest.json").stat().st_size
    assert say(store, "drop", made.key[:9]) == [f"dropped {size / 1024:.1f} KiB: prompts {made.key}"]
    assert not made.path.exists()
    assert say(store, "drop", made.key) == [f"nothing was left to drop of prompts {made.key}"]


@pytest.mark.parametrize(
    ("action", "keys", "message"),
    [("list", ["abcd"], "takes no keys"), ("drop", [], "needs the keys"), ("explain", [], "not 0"),
     ("explain", ["abcd"] * 3, "not 3"), ("drop", ["abcd"], "no artifact in"), ("explain", ["abcd"], "no artifact in")],
)  # fmt: skip
def test_refusals(store: Store, action: Any, keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        say(store, action, *keys)


def unused_for(artifact: Artifact, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(artifact.path / "manifest.json", (then, then))


def test_clean_by_the_last_use(store: Store) -> None:
    """Three of 10 KiB and a manifest each; the first is the oldest, but was reused today."""
    first, second, third = (make(store, "prompts", {"seed": seed}) for seed in (1, 2, 3))
    for artifact, days in ((first, 60), (second, 40), (third, 10)):
        unused_for(artifact, days)
    make(store, "prompts", {"seed": 1})
    size = f"{sum(f.stat().st_size for f in second.path.iterdir()) / 1024:.1f} KiB"
    assert say(store, "clean", older_than_days=30, dry_run=True) == [f"would drop {size}: prompts {second.key}"]
    assert second.path.exists()
    assert say(store, "clean", older_than_days=30) == [f"dropped {size}: prompts {second.key}"]
    assert [first.path.exists(), second.path.exists(), third.path.exists()] == [True, False, True]
    assert say(store, "clean", older_than_days=30) == [f"nothing to clean in {store.root}"]


def test_clean_by_size_drops_the_longest_unused(store: Store) -> None:
    made = [make(store, "prompts", {"seed": seed}) for seed in range(4)]
    for artifact, days in zip(made, (1, 4, 2, 3), strict=True):
        unused_for(artifact, days)
    room = 2.5 * sum(f.stat().st_size for f in made[0].path.iterdir()) / 1024**3
    assert len(say(store, "clean", keep_gib=room)) == 2
    assert [artifact.path.exists() for artifact in made] == [True, False, True, False]
    say(store, "clean", keep_gib=0)
    assert not any(artifact.path.exists() for artifact in made)


def test_clean_leaves_what_is_being_made(store: Store) -> None:
    lines: list[list[str]] = []

    def write(work: Path) -> dict[str, Any]:
        (work / "payload").write_bytes(b"x")
        lines.append(say(store, "clean", keep_gib=0))
        return {}

    store.get_or_make(ArtifactSpec("prompts", 1, {}, {}, {}), write)
    assert "being made by another run" in lines[0][0]


def test_what_a_running_stage_reads_is_neither_cleaned_nor_dropped(store: Store) -> None:
    prompts = make(store, "prompts", {})
    said: list[str] = []

    def write(work: Path) -> dict[str, Any]:
        (work / "payload").write_bytes(b"x")
        said.extend(say(store, "clean", keep_gib=0))
        with pytest.raises(EagleError, match=f"prompts {prompts.key} is read by a run that makes responses"):
            store.drop([prompts.key])
        return {}

    store.get_or_make(ArtifactSpec("responses", 1, {}, {"prompts": prompts}, {}), write)
    assert any("is read by a run that makes responses" in line for line in said)
    assert prompts.path.exists()
    say(store, "drop", prompts.key)
    assert not prompts.path.exists()


def test_a_killed_attempt_was_last_used_when_it_last_wrote(store: Store) -> None:
    def fail(work: Path) -> dict[str, Any]:
        (work / "train").mkdir()
        (work / "train" / "shard").write_bytes(b"x" * 10240)
        raise RuntimeError

    spec = ArtifactSpec("hidden_states", 1, {}, {}, {})
    with pytest.raises(RuntimeError):
        store.get_or_make(spec, fail)
    (partial,) = (store.root / "hidden_states").glob(".*.partial")
    long_ago = time.time() - 40 * 86400
    os.utime(partial, (long_ago, long_ago))  # its root has not changed since it was made
    assert say(store, "clean", older_than_days=30) == [f"nothing to clean in {store.root}"]
    for path in (partial / "train" / "shard", partial / "train", partial):
        os.utime(path, (long_ago, long_ago))
    assert len(say(store, "clean", older_than_days=30)) == 1


def test_clean_needs_a_measure_and_is_alone_with_it(store: Store) -> None:
    for action, keys, options in (
        ("clean", (), {}), ("clean", ("abcd",), {"keep_gib": 1}), ("list", (), {"keep_gib": 1}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"older_than_days|takes no keys"):
            say(store, action, *keys, **options)
