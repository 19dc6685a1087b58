"""Content fingerprints of files: what a target, a tokenizer or a prompt file is, wherever it lies.

Hashing is memoised by path, inode, size and times in a small file of the user's cache. The memo only saves time: where
it is broken, missing or cannot be written, files are read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eagle3x.identity import digest
from eagle3x.types import EagleError

SETTLED_NS = 2_000_000_000
"""A file that changed less than this before it was read is not remembered: it could change again within the clock
tick of its file system (up to 2 s on some) and still show the same times."""
MEMO_LIMIT = 4096
"""More entries than this: those whose file is gone are forgotten."""
LOCK_SECONDS = 5.0
THREADS = 4


def cache_dir() -> Path:
    """Where results that any run of this user can share are kept: $EAGLE3X_CACHE, else ~/.cache/eagle3x."""
    named = os.environ.get("EAGLE3X_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "eagle3x"


def fingerprint_file(path: Path) -> str:
    """SHA-256 (hex) of the file's bytes. EagleError if it is missing, unreadable, or changes while it is read."""
    return _hashes([path])[path]


def fingerprint_files(paths: Iterable[Path], root: Path) -> str:
    """SHA-256 (hex) over the names, relative to `root`, and the contents of `paths`; their order does not matter.

    A directory among them stands for all files below it. Formula: `digest({relative name: sha256 of the bytes})`, so
    moving `root` changes nothing and renaming a file below it does. ValueError if a path is not below `root`.
    """
    files = sorted({file for path in paths for file in _files(path)})
    hashes = _hashes(files)
    return digest({file.relative_to(root).as_posix(): hashes[file] for file in files})


def fingerprint_directory(path: Path) -> str:
    """`fingerprint_files` of everything below a directory."""
    return fingerprint_files([path], path)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    # os.walk with followlinks: a directory that is a link is part of the content as well.
    return [Path(folder) / name for folder, _, names in os.walk(path, followlinks=True) for name in names]


def _hashes(files: list[Path]) -> dict[Path, str]:
    memo = _read_memo()
    found: dict[Path, str] = {}
    missed: list[Path] = []
    for file in files:
        known = memo.get(_memo_key(file))
        if known is not None and known[:-1] == _state(file):
            found[file] = known[-1]
        else:
            missed.append(file)
    if not missed:
        return found
    with ThreadPoolExecutor(THREADS) as pool:  # hashlib releases the GIL
        read = dict(zip(missed, pool.map(_read, missed), strict=True))
    _remember({_memo_key(file): [*state, sha] for file, (sha, state, settled) in read.items() if settled})
    return found | {file: sha for file, (sha, _, _) in read.items()}


def _read(file: Path) -> tuple[str, list[int], bool]:
    """Hash, state and whether that state vouches for the content from now on."""
    before = _state(file)
    settled = time.time_ns() - max(before[2:]) > SETTLED_NS
    try:
        with file.open("rb") as stream:
            sha = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise EagleError(f"cannot read {file}: {error.strerror}") from error
    if _state(file) != before:
        raise EagleError(f"{file} changed while it was read: wait until it is written, then start again")
    return sha, before, settled


def _state(file: Path) -> list[int]:
    """Inode, size, mtime and ctime: the last one also moves where a tool restores the mtime after a change."""
    try:
        s = file.stat()
    except OSError as error:
        raise EagleError(f"cannot read {file}: {error.strerror}") from error
    return [s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]


def _memo_key(file: Path) -> str:
    return str(file.absolute())


def _memo_file() -> Path:
    return cache_dir() / "fingerprints.json"


def _read_memo() -> dict[str, list[Any]]:
    """Path to [inode, size, mtime_ns, ctime_ns, sha256]; empty where there is no readable memo."""
    try:
        memo = json.loads(_memo_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return {p: e for p, e in memo.items() if _is_entry(e)} if isinstance(memo, dict) else {}


def _is_entry(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 5:
        return False
    return all(isinstance(v, int) for v in value[:-1]) and isinstance(value[-1], str) and len(value[-1]) == 64


def _remember(entries: Mapping[str, list[Any]]) -> None:
    """Add to the memo. Other processes may do the same: read and replaced under a lock, replaced in one step."""
    if not entries:
        return
    file = _memo_file()
    with suppress(OSError, Timeout):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(".fingerprints.lock"), timeout=LOCK_SECONDS):
            memo = {**_read_memo(), **entries}
            if len(memo) > MEMO_LIMIT:
                memo = {path: entry for path, entry in memo.items() if Path(path).exists()}
            new = file.with_name(".fingerprints.json.new")
            new.write_text(json.dumps(memo))
            new.replace(file)
