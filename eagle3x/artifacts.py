"""The artifact store: where results lie, who makes them, and when they count as made.

    <root>/<stage>/<key>/                 complete: its manifest.json was written last, then one rename put it here
    <root>/<stage>/.<key>.partial/        being made, or what a killed attempt left; the maker resumes from it
    <root>/<stage>/.<key>.attempt.json    the manifest of an unfinished artifact: recipe and time spent so far
    <root>/<stage>/.<key>.lock            held by the one run that makes or drops it
    <root>/<stage>/<key>.dropped.json     the manifest of an artifact whose payload was dropped
    <root>/<stage>/.<key>.trash/          payload on its way out

No other module knows these paths, which is why this one is long: making, finding and dropping share them and the locks.
Incomplete means absent.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from eagle3x.explanation import Explanation, explain
from eagle3x.identity import digest, identity_of
from eagle3x.manifest import SCHEMA_VERSION, Manifest, facts_of, masked, plain, sync_directory
from eagle3x.payload import (
    MANIFEST,
    damaged,
    is_no_room,
    last_change,
    last_use,
    record_files,
    show_bytes,
    size_fault,
    size_on_disk,
)
from eagle3x.progress import log
from eagle3x.provenance import git_revision, host, package_versions
from eagle3x.types import ConfigError, EagleError

KEY_LENGTH = 20
SHORTEST_PREFIX = 4
WAITING_SECONDS = 1.0
"""A run that waits longer than this for another one says so."""
State = Literal["complete", "dropped", "partial", "damaged"]
KEY = f"[0-9a-f]{{{KEY_LENGTH}}}"
NAMES: dict[State, re.Pattern[str]] = {
    "complete": re.compile(f"({KEY})"),
    "partial": re.compile(rf"\.({KEY})\.partial"),
    "dropped": re.compile(rf"({KEY})\.dropped\.json"),
}
"""In order of precedence: a key with several of these names is what the first one says."""


@dataclass(frozen=True)
class Artifact:
    """A complete artifact. `reused`: it was there already, or another run made it while this one waited."""

    stage: str
    key: str
    path: Path
    manifest: Manifest
    reused: bool = True


@dataclass(frozen=True)
class ArtifactSpec:
    """What is wanted: the recipe that is hashed, and the resolved `config` that the manifest keeps."""

    stage: str
    version: int
    identity: dict[str, Any]
    parents: Mapping[str, Artifact]
    config: dict[str, Any]

    @cached_property
    def key(self) -> str:
        """The first 20 hex digits of `digest({identity, parents, stage, version})`; parents are stage to key."""
        parents = {name: parent.key for name, parent in self.parents.items()}
        recipe = {"stage": self.stage, "version": self.version, "identity": self.identity, "parents": parents}
        return digest(identity_of(recipe))[:KEY_LENGTH]


@dataclass(frozen=True)
class Entry:
    """One line of the store's list. `manifest` is None where it cannot be read; `bytes` is what lies on the disk.

    `used`: when a run last made it, went on with it or reused it, seconds since the epoch.
    """

    stage: str
    key: str
    state: State
    bytes: int
    manifest: Manifest | None
    used: float


class Store:
    """The artifacts below `root`. Any number of processes may use it at the same time."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def lookup(self, spec: ArtifactSpec) -> Artifact | None:
        """The artifact if it is complete, None if it is not. EagleError if a file of it is missing or cut."""
        path = self._path(spec.stage, spec.key)
        try:
            manifest = Manifest.read(path / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            if not path.exists():
                return None
            if (path / MANIFEST).exists():  # another run has just published it
                return self.lookup(spec)
            raise damaged(spec.stage, spec.key, f"{path / MANIFEST} is missing") from None
        except EagleError as error:
            raise damaged(spec.stage, spec.key, str(error)) from error
        artifact = Artifact(spec.stage, spec.key, path, manifest)
        fault = size_fault(path, manifest)
        if fault is None:
            with suppress(OSError):  # a store that this user may only read
                os.utime(path / MANIFEST)  # the time of its last use
            return artifact
        if not path.exists():  # dropped between the two looks
            return None
        raise damaged(spec.stage, spec.key, fault)

    def get_or_make(self, spec: ArtifactSpec, make: Callable[[Path], Mapping[str, Any]]) -> Artifact:
        """The artifact that `spec` describes; made by `make(work_dir)` if there is none.

        `work_dir` holds what an earlier attempt at this same artifact left; `make` resumes from it and returns facts
        for the manifest. If another run is making it, this one waits, then reuses. After a failure the partial result
        stays. EagleError: the artifact is damaged, or the disk is full.
        """
        found = self.lookup(spec)
        if found is not None:
            return found
        try:
            with self._lock(spec.stage, spec.key):
                found = self.lookup(spec)
                if found is not None:
                    return found
                manifest = self._finished(spec) or self._attempt(spec, make)
                return self._publish(spec, manifest)
        except Exception as error:
            if isinstance(error, EagleError) or not is_no_room(error):
                raise
            raise self._disk_full(spec, error) from error

    def entries(self) -> list[Entry]:
        """Everything in the store, by stage, oldest first."""
        found: dict[tuple[str, str], State] = {}
        for stage in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            names = sorted(p.name for p in stage.iterdir()) if stage.is_dir() else ()
            for state, pattern in NAMES.items():
                for match in filter(None, map(pattern.fullmatch, names)):
                    found.setdefault((stage.name, match[1]), state)
        entries = [entry for (stage, key), state in found.items() if (entry := self._entry(stage, key, state))]
        return sorted(entries, key=lambda e: (e.stage, e.manifest.started if e.manifest else "", e.key))

    def complete(self, stage: str) -> list[Artifact]:
        """The complete artifacts of a stage, oldest first."""
        return [
            Artifact(stage, entry.key, self._path(stage, entry.key), entry.manifest)
            for entry in self.entries()
            if entry.stage == stage and entry.state == "complete" and entry.manifest
        ]

    def find(self, prefix: str) -> Entry:
        """The one entry whose key starts with `prefix`; ConfigError if there is none, or more than one."""
        entries = self.entries()
        if len(prefix) < SHORTEST_PREFIX:
            raise ConfigError(f"key {prefix!r} is too short: give at least {SHORTEST_PREFIX} of its characters")
        hits = [entry for entry in entries if entry.key.startswith(prefix)]
        if len(hits) == 1:
            return hits[0]
        if hits:
            names = ", ".join(f"{e.stage} {e.key}" for e in hits)
            raise ConfigError(f"key {prefix} is ambiguous: {names}; give more of its characters")
        shown = {e.key[: len(prefix)]: e for e in entries}
        near = [shown[name] for name in get_close_matches(prefix, shown, n=3, cutoff=0.0)]
        hint = "nearest: " + ", ".join(f"{e.stage} {e.key}" for e in near) if near else "the store is empty"
        raise ConfigError(f"no artifact in {self.root} has a key that starts with {prefix!r} ({hint})")

    def explain(self, prefix_a: str, prefix_b: str) -> Explanation:
        """Why the keys of two artifacts of one stage differ, down to the parents where the difference began."""
        a, b = (self._explained(prefix) for prefix in (prefix_a, prefix_b))
        if a.stage != b.stage:
            raise ConfigError(f"{a.key} is {a.stage}, {b.key} is {b.stage}: explain compares artifacts of one stage")
        return explain(a, b, self.manifest)

    def drop(self, prefixes: Sequence[str]) -> list[Entry]:
        """Delete payloads (partial ones as well), keep manifests; returns what was dropped, as it was before.

        All keys are found before anything is deleted. EagleError if a run is making one of them, or reads it.
        """
        entries = list({(e.stage, e.key): e for e in map(self.find, prefixes)}.values())
        for entry in entries:
            self._drop(entry.stage, entry.key)
        return entries

    def _drop(self, stage: str, key: str) -> None:
        try:
            with self._lock(stage, key, wait=False):
                if (reader := self._reader(key)) is not None:
                    raise EagleError(
                        f"{stage} {key} is read by a run that makes {reader.stage} {reader.key}: drop it later"
                    )
                self._empty_trash(stage, key)
                path, partial = self._path(stage, key), self._path(stage, key, ".partial")
                if path.exists():
                    self._keep_manifest(stage, key)
                    path.rename(self._path(stage, key, ".trash"))
                    sync_directory(path.parent)
                elif partial.exists():
                    partial.rename(self._path(stage, key, ".trash"))
                self._path(stage, key, ".attempt.json").unlink(missing_ok=True)
                self._empty_trash(stage, key)
        except Timeout:
            raise EagleError(f"{stage} {key} is being made by another run: drop it when that run has ended") from None

    def _reader(self, key: str) -> Manifest | None:
        """An attempt that is going on now and was given this artifact."""
        for record in self.root.glob("*/.*.attempt.json"):
            with suppress(EagleError, FileNotFoundError):
                attempt = Manifest.read(record)
                if key in attempt.parents.values():
                    try:
                        with self._lock(attempt.stage, attempt.key, wait=False):
                            continue  # nobody makes it any more
                    except Timeout:
                        return attempt
        return None

    def _keep_manifest(self, stage: str, key: str) -> None:
        """Give the manifest its second name before the payload goes, so that it can be read at any moment."""
        manifest, kept = self._path(stage, key) / MANIFEST, self._dropped(stage, key)
        kept.unlink(missing_ok=True)
        with suppress(FileNotFoundError, EagleError):  # a damaged one is not worth keeping
            whole = Manifest.read(manifest)
            try:
                os.link(manifest, kept)  # takes no room: payloads are dropped when the disk is full
            except OSError:
                whole.write(kept)

    def _attempt(self, spec: ArtifactSpec, make: Callable[[Path], Mapping[str, Any]]) -> Manifest:
        """Run the maker in the partial directory and complete it with its manifest, all of it on the disk."""
        self._empty_trash(spec.stage, spec.key)
        partial = self._path(spec.stage, spec.key, ".partial")
        record = self._path(spec.stage, spec.key, ".attempt.json")
        begun = self._begin(spec, partial, record)
        start = time.monotonic()
        try:
            facts = facts_of(spec.stage, make(partial))
            files = record_files(partial)
        except BaseException:
            with suppress(OSError):  # a full disk must not hide the failure
                replace(begun, wall_seconds=begun.wall_seconds + time.monotonic() - start).write(record)
            raise
        wall_seconds = round(begun.wall_seconds + time.monotonic() - start, 3)
        finished = replace(begun, ended=_now(), wall_seconds=wall_seconds, facts=facts, files=files)
        # By way of the record's place, so that a kill leaves no scrap among the maker's files.
        finished.write(record)
        record.rename(partial / MANIFEST)
        sync_directory(partial)
        return finished

    def _begin(self, spec: ArtifactSpec, partial: Path, record: Path) -> Manifest:
        """The manifest of this attempt as far as it is known, kept beside the partial directory."""
        resumed = partial.exists()
        partial.mkdir(exist_ok=True)
        (partial / MANIFEST).unlink(missing_ok=True)
        begun = Manifest(
            schema_version=SCHEMA_VERSION,
            stage=spec.stage,
            key=spec.key,
            version=spec.version,
            identity=masked(identity_of(spec.identity)),
            parents={name: parent.key for name, parent in spec.parents.items()},
            config=masked(plain(spec.config)),
            packages=package_versions(),
            python=platform.python_version(),
            git=git_revision(),
            host=host(),
            started=_now(),
            ended=None,
            wall_seconds=0.0,
            facts={},
            files={},
        )
        if resumed:
            log(f"{spec.stage} {spec.key}: going on from what an earlier attempt left")
            with suppress(FileNotFoundError, EagleError):
                earlier = Manifest.read(record)
                # A killed attempt could not say how long it worked: until the last thing that it wrote.
                unrecorded = max(0.0, last_change(partial) - record.stat().st_mtime)
                begun = replace(begun, started=earlier.started, wall_seconds=earlier.wall_seconds + unrecorded)
        begun.write(record)
        return begun

    def _finished(self, spec: ArtifactSpec) -> Manifest | None:
        """The manifest of a partial directory that lacks nothing but its rename: its run was killed just before it."""
        partial = self._path(spec.stage, spec.key, ".partial")
        try:
            manifest = Manifest.read(partial / MANIFEST)
        except (FileNotFoundError, EagleError):
            return None
        whole = manifest.key == spec.key and manifest.ended is not None and size_fault(partial, manifest) is None
        return manifest if whole else None

    def _publish(self, spec: ArtifactSpec, manifest: Manifest) -> Artifact:
        path = self._path(spec.stage, spec.key)
        self._path(spec.stage, spec.key, ".partial").rename(path)
        sync_directory(path.parent)
        self._path(spec.stage, spec.key, ".attempt.json").unlink(missing_ok=True)
        self._dropped(spec.stage, spec.key).unlink(missing_ok=True)
        return Artifact(spec.stage, spec.key, path, manifest, reused=False)

    @contextmanager
    def _lock(self, stage: str, key: str, wait: bool = True) -> Iterator[None]:
        """Hold the artifact. Without `wait`, `Timeout` if another run holds it. A killed run's lock is free."""
        file = self._path(stage, key, ".lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(file)
            try:
                lock.acquire(timeout=WAITING_SECONDS if wait else 0)
            except Timeout:
                if not wait:
                    raise
                log(f"waiting for another run that makes {stage} {key}")
                lock.acquire()
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise EagleError(f"cannot write artifacts to {self.root}: {error}; set artifacts=<a folder>") from error
        try:
            yield
        finally:
            lock.release()

    def _entry(self, stage: str, key: str, state: State) -> Entry | None:
        """None if it went away meanwhile."""
        path = self._path(stage, key, ".partial" if state == "partial" else "")
        try:
            manifest = self.manifest(stage, key)
        except EagleError:
            return Entry(
                stage, key, "damaged" if state == "complete" else state, size_on_disk(path), None, last_use(path)
            )
        if state == "complete":
            fault = manifest is None or size_fault(path, manifest) is not None
            if fault and not path.exists():
                return None
            return Entry(stage, key, "damaged" if fault else "complete", size_on_disk(path), manifest, last_use(path))
        return Entry(stage, key, state, size_on_disk(path) if state == "partial" else 0, manifest, last_use(path))

    def manifest(self, stage: str, key: str) -> Manifest | None:
        """Of a complete, unfinished or dropped artifact, whichever there is."""
        places = (
            self._path(stage, key) / MANIFEST,
            self._path(stage, key, ".attempt.json"),
            self._dropped(stage, key),
        )
        for place in places:
            with suppress(FileNotFoundError):
                return Manifest.read(place)
        return None

    def _explained(self, prefix: str) -> Manifest:
        entry = self.find(prefix)
        if entry.manifest is None:
            raise EagleError(f"{entry.stage} {entry.key} has no readable manifest: nothing is known of it")
        return entry.manifest

    def _disk_full(self, spec: ArtifactSpec, error: Exception) -> EagleError:
        written = size_on_disk(self._path(spec.stage, spec.key, ".partial"))
        earlier = [e.bytes for e in self.entries() if e.stage == spec.stage and e.state == "complete"]
        needed = f"; a finished {spec.stage} artifact here takes up to {show_bytes(max(earlier))}" if earlier else ""
        free = shutil.disk_usage(self.root).free
        return EagleError(
            f"no room for {spec.stage} {spec.key} in {self.root}: {error}. It needs more than the"
            f" {show_bytes(written)} written so far, {show_bytes(free)} are free{needed}."
            " What is finished is kept: free some space, e.g. with command=artifacts action=drop, or set artifacts=<a"
            " folder on a larger disk>, then run the same command again"
        )

    def _empty_trash(self, stage: str, key: str) -> None:
        trash = self._path(stage, key, ".trash")
        if trash.exists():
            shutil.rmtree(trash)

    def _path(self, stage: str, key: str, suffix: str = "") -> Path:
        return self.root / stage / (f".{key}{suffix}" if suffix else key)

    def _dropped(self, stage: str, key: str) -> Path:
        return self.root / stage / f"{key}.dropped.json"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
