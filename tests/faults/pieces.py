"""A maker in resumable pieces, and the run that tests of this folder kill: `python pieces.py ROOT LOG NAME SECONDS`.

Each finished piece leaves one line in LOG: a piece with two lines was finished and made again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3x.artifacts import ArtifactSpec, Store
from eagle3x.provenance import git_revision, host, package_versions

PIECES = 6
PIECE_BYTES = 32 * 2000


def spec(name: str) -> ArtifactSpec:
    return ArtifactSpec("hidden_states", 1, {"name": name}, {}, {})


def content(name: str, i: int) -> bytes:
    return hashlib.sha256(f"{name} {i}".encode()).digest() * (PIECE_BYTES // 32)


def made_pieces(log: Path) -> list[str]:
    return log.read_text().split("\n")[:-1] if log.exists() else []


def maker(name: str, log: Path, seconds: float = 0.0) -> Callable[[Path], dict[str, Any]]:
    """Makes `PIECES` pieces, each in at least `seconds`; those that are there already are left alone."""

    def make(work: Path) -> dict[str, Any]:
        (work / "train").mkdir(exist_ok=True)
        for i in range(PIECES):
            piece = work / "train" / f"{i}.bin"
            if piece.exists():
                continue
            time.sleep(seconds)
            new = work / f"{i}.new"
            new.write_bytes(content(name, i))
            new.replace(piece)
            with log.open("a") as lines:
                lines.write(f"{name} {i}\n")
        return {"pieces": PIECES}

    return make


def check_whole(path: Path, name: str) -> None:
    """Without the store's own eyes: everything is there, and right."""
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*"))
    assert names == sorted(["manifest.json", "train", *(f"train/{i}.bin" for i in range(PIECES))]), names
    for i in range(PIECES):
        assert (path / "train" / f"{i}.bin").read_bytes() == content(name, i)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _, root, log, name, seconds = sys.argv
    package_versions(), git_revision(), host()  # remembered: what follows is the store's own work
    print("ready", flush=True)
    artifact = Store(Path(root)).get_or_make(spec(name), maker(name, Path(log), float(seconds)))
    print("reused" if artifact.reused else "made", flush=True)
    # The interpreter's own way down takes long enough to be killed in, and is not what is tested.
    os._exit(0)
