"""Fingerprints are of content alone, and the memo behind them never changes one.

The literal digests come from `sha256sum` of the bytes and of the canonical JSON, typed by hand.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3x import fingerprint
from eagle3x.fingerprint import fingerprint_directory, fingerprint_file, fingerprint_files
from eagle3x.types import EagleError

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
TREE = "2c0e97d44c24344b703fa1be9ed7866587a7208e23cb7cc4bc0145d4eb7955f0"
"""Of {"a.txt":sha256("hello"),"sub/b.txt":sha256("world")}."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("EAGLE3X_CACHE", str(path))
    monkeypatch.setattr(fingerprint, "SETTLED_NS", 0)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("hello")
    (root / "sub" / "b.txt").write_text("world")
    return root


def memo(cache: Path) -> dict[str, list[object]]:
    return json.loads((cache / "fingerprints.json").read_text())


def plant(cache: Path, file: Path, sha: str) -> None:
    """Write into the memo what the file never had: whoever believes the memo answers it."""
    s = file.stat()
    cache.mkdir(exist_ok=True)
    entry = {str(file): [s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, sha]}
    (cache / "fingerprints.json").write_text(json.dumps(entry))


def test_known_answers(tree: Path) -> None:
    assert fingerprint_file(tree / "a.txt") == HELLO
    assert fingerprint_directory(tree) == TREE
    assert fingerprint_files([tree / "sub" / "b.txt", tree / "a.txt"], tree) == TREE, "order does not matter"
    assert fingerprint_files([tree / "a.txt", tree / "sub", tree], tree) == TREE, "a file named twice counts once"


def test_place_is_no_content(tree: Path) -> None:
    assert fingerprint_directory(tree.rename(tree.with_name("elsewhere"))) == TREE


def test_linked_files_count_by_what_they_point_at(tree: Path, tmp_path: Path) -> None:
    """As in the hub's cache, whose snapshots are links to blobs."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "a.txt").symlink_to(tree / "a.txt")
    (snapshot / "sub").symlink_to(tree / "sub")
    assert fingerprint_directory(snapshot) == TREE


def test_rename_and_new_file_change_it(tree: Path) -> None:
    (tree / "a.txt").rename(tree / "c.txt")
    renamed = fingerprint_directory(tree)
    (tree / "empty").touch()
    assert len({TREE, renamed, fingerprint_directory(tree)}) == 3


def test_changed_byte_of_same_size(tree: Path) -> None:
    file = tree / "a.txt"
    os.utime(file, ns=(0, 10**18))
    assert fingerprint_file(file) == HELLO
    file.write_text("hellO")
    os.utime(file, ns=(0, 10**18 + 1))
    assert fingerprint_file(file) != HELLO


def test_changed_byte_behind_a_restored_mtime(tree: Path) -> None:
    file = tree / "a.txt"
    os.utime(file, ns=(0, 10**18))
    assert fingerprint_file(file) == HELLO
    file.write_text("hellO")
    os.utime(file, ns=(0, 10**18))
    assert fingerprint_file(file) != HELLO


def test_memo_saves_reading(cache: Path, tree: Path) -> None:
    file = tree / "a.txt"
    fingerprint_file(file)
    assert memo(cache)[str(file)][-1] == HELLO
    plant(cache, file, "f" * 64)
    assert fingerprint_file(file) == "f" * 64, "an unchanged file is not read again"
    file.touch()
    assert fingerprint_file(file) == HELLO


def test_file_that_has_just_changed_is_not_remembered(cache: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_NS", 3600 * 10**9)
    assert fingerprint_file(tree / "a.txt") == HELLO
    assert not (cache / "fingerprints.json").exists()


@pytest.mark.parametrize("broken", ["", "{", "[1]", "null", '{"a": 1}', '{"PATH": ["x"]}', "\x00\x01"])
def test_broken_memo_is_rebuilt(cache: Path, tree: Path, broken: str) -> None:
    cache.mkdir()
    (cache / "fingerprints.json").write_text(broken.replace("PATH", str(tree / "a.txt")))
    assert fingerprint_file(tree / "a.txt") == HELLO
    assert memo(cache)[str(tree / "a.txt")][-1] == HELLO


def test_no_cache_directory_at_all(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EAGLE3X_CACHE", str(tmp_path / "file"))
    assert fingerprint_file(tree / "a.txt") == HELLO


def test_memo_forgets_files_that_are_gone(cache: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MEMO_LIMIT", 1)
    fingerprint_directory(tree)
    (tree / "a.txt").unlink()
    (tree / "sub" / "c.txt").write_text("new")
    fingerprint_directory(tree)
    assert set(memo(cache)) == {str(tree / "sub" / "b.txt"), str(tree / "sub" / "c.txt")}


def test_missing_file_is_named(tree: Path) -> None:
    with pytest.raises(EagleError, match=r"gone\.txt"):
        fingerprint_files([tree / "gone.txt"], tree)


def test_file_that_changes_while_it_is_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tree / "a.txt"
    digest_of = fingerprint.hashlib.file_digest

    def grow(stream: object, name: str) -> object:
        with file.open("a") as more:
            more.write("!")
        return digest_of(stream, name)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(fingerprint.hashlib, "file_digest", grow)
    with pytest.raises(EagleError, match=r"a\.txt changed while it was read"):
        fingerprint_file(file)


def test_many_processes_share_the_memo(cache: Path, tmp_path: Path) -> None:
    """Each of 6 processes adds 5 files of its own, one at a time: none may lose another's, or fail."""
    folders = [tmp_path / f"folder{i}" for i in range(6)]
    for folder in folders:
        folder.mkdir()
        for i in range(5):
            (folder / f"{i}.txt").write_text("hello")
    code = (
        "import sys; from pathlib import Path; from eagle3x import fingerprint; fingerprint.SETTLED_NS = 0\n"
        "for file in Path(sys.argv[1]).iterdir(): print(fingerprint.fingerprint_file(file))"
    )
    commands = [[sys.executable, "-c", code, str(folder)] for folder in folders]
    for process in [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]:
        assert process.communicate(timeout=60)[0].split() == [HELLO] * 5
        assert process.returncode == 0
    assert len(memo(cache)) == 30
    assert stat.S_ISREG((cache / "fingerprints.json").stat().st_mode)
