"""environments/make.sh: whole or absent, made once, found again by another checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "environments" / "make.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment `tiny` asks for nothing."""
    folder = tmp_path / "checkout" / "environments"
    folder.mkdir(parents=True)
    shutil.copy(SCRIPT, folder)
    (folder / "tiny.txt").write_text("# nothing\n")
    return folder.parent


def start(checkout: Path, check: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "EAGLE3X_ENVIRONMENTS": str(checkout.parent / "cache"), "PYTHON": sys.executable}
    return subprocess.Popen(
        ["environments/make.sh", "tiny", ".venv-tiny", check, "--no-deps", *arguments],
        cwd=checkout, env=environment, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip


def make(checkout: Path, check: str = "pass", *arguments: str) -> tuple[int, str]:
    process = start(checkout, check, *arguments)
    _, said = process.communicate()
    return process.returncode, said


def environments(checkout: Path) -> list[Path]:
    return [path for path in (checkout.parent / "cache").iterdir() if path.is_dir()]


def test_another_checkout_finds_what_one_made(checkout: Path) -> None:
    code, said = make(checkout)
    assert code == 0, said
    (place,) = environments(checkout)
    assert (checkout / ".venv-tiny").readlink() == place
    assert subprocess.run([checkout / ".venv-tiny" / "bin" / "python", "-c", "import pip"]).returncode == 0

    other = checkout.parent / "other"
    shutil.copytree(checkout, other, symlinks=True, ignore=shutil.ignore_patterns(".venv*"))
    assert make(other, "raise SystemExit('made again')") == (0, "")
    assert (other / ".venv-tiny").readlink() == place

    (other / "environments" / "tiny.txt").write_text("# something else\n")
    assert make(other)[0] == 0
    assert (other / ".venv-tiny").readlink() != place
    assert len(environments(checkout)) == 2


def test_what_a_folder_among_the_arguments_holds_decides_too_but_not_its_tests(checkout: Path) -> None:
    folder = checkout / "packages"
    folder.mkdir()
    (folder / "one.py").write_text("1")
    for change, made in (("one.py", 1), ("test_one.py", 1), ("one.py", 2), ("two.py", 3)):
        with (folder / change).open("a") as file:
            file.write("1")
        assert make(checkout, "pass", "--find-links", "packages")[0] == 0
        assert len(environments(checkout)) == made


def test_what_fails_its_check_is_not_taken_for_made(checkout: Path) -> None:
    code, said = make(checkout, "raise SystemExit('cannot be imported')")
    assert code != 0
    assert "cannot be imported" in said
    assert not (checkout / ".venv-tiny").is_symlink()
    (place,) = environments(checkout)
    (place / "left").touch()
    code, said = make(checkout)
    assert code == 0, said
    assert not (place / "left").exists()


def test_two_at_once_make_one(checkout: Path) -> None:
    check = "from pathlib import Path; Path('checks').open('a').write('x')"
    both = [start(checkout, check) for _ in range(2)]
    for process in both:
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert (checkout / "checks").read_text() == "x"


def test_a_folder_of_the_user_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv-tiny").mkdir()
    code, said = make(checkout)
    assert code == 1
    assert ".venv-tiny is a folder of its own" in said
    assert not (checkout.parent / "cache").exists()
