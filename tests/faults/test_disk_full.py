"""A disk that fills up while an artifact is made: a message that says so, nothing half made, nothing lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pieces
import pytest
from pieces import PIECE_BYTES, PIECES, check_whole, made_pieces, maker, spec

from eagle3x.artifacts import ArtifactSpec, Store
from eagle3x.types import EagleError

KIB = 1024


def mount(where: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def fill_up(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(b"x" * 4096):
            pass
    assert shutil.disk_usage(disk).free == 0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB: room for 4 of the 6 pieces."""
    assert 4 * PIECE_BYTES < 256 * KIB < PIECES * PIECE_BYTES
    where = tmp_path / "disk"
    where.mkdir()
    if not mount(where, f"size={256 * KIB}"):
        pytest.skip("only root may mount a file system")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_fills_up_then_goes_on_with_more_room(tiny_disk: Path, tmp_path: Path) -> None:
    store, log = Store(tiny_disk / "artifacts"), tmp_path / "log"
    with pytest.raises(EagleError) as caught:
        store.get_or_make(spec("x"), maker("x", log))
    message = str(caught.value)
    written = re.search(r"more than the (\d+\.\d) KiB written so far, (\d+ B|\d+\.\d KiB) are free", message)
    assert written is not None, message
    assert float(written[1]) >= 3 * PIECE_BYTES / KIB
    assert f"no room for hidden_states {spec('x').key} in {tiny_disk / 'artifacts'}" in message
    assert "No space left on device" in message
    assert isinstance(caught.value.__cause__, OSError)
    assert store.lookup(spec("x")) is None
    assert [e.state for e in store.entries()] == ["partial"]
    finished = made_pieces(log)
    assert len(finished) >= 3

    with pytest.raises(EagleError, match="no room for"):
        store.get_or_make(spec("x"), maker("x", log))
    assert made_pieces(log) == finished, "still full: nothing is made, nothing is lost"

    assert mount(tiny_disk, f"remount,size={1024 * KIB}")
    check_whole(store.get_or_make(spec("x"), maker("x", log)).path, "x")
    assert Counter(made_pieces(log)) == {f"x {i}": 1 for i in range(PIECES)}


def test_dropping_makes_room_on_a_full_disk(tiny_disk: Path, tmp_path: Path) -> None:
    def fill(size: int) -> Any:
        def make(work: Path) -> dict[str, Any]:
            (work / "payload").write_bytes(b"x" * size)
            return {}

        return make

    store = Store(tiny_disk / "artifacts")
    old = store.get_or_make(ArtifactSpec("hidden_states", 1, {"name": "old"}, {}, {}), fill(150 * KIB))
    new = ArtifactSpec("hidden_states", 1, {"name": "new"}, {}, {})
    with pytest.raises(EagleError, match=r"a finished hidden_states artifact here takes up to 15\d\.\d KiB"):
        store.get_or_make(new, fill(150 * KIB))
    fill_up(tiny_disk)
    store.drop([old.key])
    assert store.manifest("hidden_states", old.key) == old.manifest
    (tiny_disk / "filler").unlink()
    assert not store.get_or_make(new, fill(150 * KIB)).reused


def test_no_room_even_to_begin(tiny_disk: Path) -> None:
    fill_up(tiny_disk)
    store = Store(tiny_disk / "artifacts")
    with pytest.raises(EagleError, match="no room for hidden_states"):
        store.get_or_make(spec("x"), lambda work: {"made": "nothing"})
    assert store.lookup(spec("x")) is None
    (tiny_disk / "filler").unlink()
    assert not store.get_or_make(spec("x"), lambda work: {}).reused


def test_file_size_limit(tmp_path: Path) -> None:
    """Without root as well: the operating system refuses the third piece of a growing file."""
    code = f"""
import resource, sys
from pathlib import Path
from eagle3x.artifacts import Store
from eagle3x.types import EagleError
from pieces import spec
resource.setrlimit(resource.RLIMIT_FSIZE, ({100 * KIB}, {100 * KIB}))
def make(work):
    with (work / "grows").open("ab", buffering=0) as stream:
        for _ in range(3):
            assert stream.write(b"x" * {50 * KIB}) == {50 * KIB}
        return {{}}
try:
    Store(Path(sys.argv[1])).get_or_make(spec("x"), make)
except EagleError as error:
    print(error)
"""
    env = os.environ | {"PYTHONPATH": str(Path(pieces.__file__).parent)}
    command = [sys.executable, "-c", code, str(tmp_path / "artifacts")]
    said = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    assert said.startswith("no room for hidden_states"), said
    assert "File too large" in said
    assert "100.0 KiB written so far" in said
    assert [(e.state, e.bytes) for e in Store(tmp_path / "artifacts").entries()] == [("partial", 100 * KIB)]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(122, "Disk quota exceeded"),
    ],
    ids=["safetensors", "quota"],
)
def test_disk_full_in_a_librarys_words(tmp_path: Path, error: Exception) -> None:
    def make(work: Path) -> dict[str, Any]:
        try:
            raise error
        except Exception as inner:
            raise ValueError("could not save") from inner

    with pytest.raises(EagleError, match="no room for"):
        Store(tmp_path).get_or_make(spec("x"), make)


def test_other_failures_are_not_called_a_full_disk(tmp_path: Path) -> None:
    def make(work: Path) -> dict[str, Any]:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        Store(tmp_path).get_or_make(spec("x"), make)
    assert [e.state for e in Store(tmp_path).entries()] == ["partial"]


def test_a_makers_own_message_passes(tmp_path: Path) -> None:
    def make(work: Path) -> dict[str, Any]:
        raise EagleError("needs 35 GiB, 2 GiB are free") from OSError(28, "No space left on device")

    with pytest.raises(EagleError, match=r"^needs 35 GiB, 2 GiB are free$"):
        Store(tmp_path).get_or_make(spec("x"), make)
