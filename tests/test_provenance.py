"""Where a result was made: true for a checkout, silent outside of one, without names of machines."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from eagle3x import provenance

CODE = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from eagle3x import provenance;"
    "r = provenance.git_revision(); print(json.dumps(r and [r.revision, r.dirty]))"
)


def git(where: Path, *args: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return subprocess.run(
        ["git", *identity, *args], cwd=where, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def revision_seen(root: Path, **env: str) -> list[object] | None:
    """What a run from the package below `root` says of itself; working directory elsewhere."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(root)],
        cwd="/", env=os.environ | env, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a small copy of the package."""
    package = tmp_path / "repo" / "eagle3x"
    package.mkdir(parents=True)
    shutil.copy(provenance.__file__, package / "provenance.py")
    (package / "__init__.py").touch()
    root = package.parent
    (root / "conf").mkdir()
    (root / "conf" / "a.yaml").write_text("a: 1\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
class TestGitRevision:
    def test_clean_then_dirty(self, checkout: Path) -> None:
        head = git(checkout, "rev-parse", "HEAD")
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        assert revision_seen(checkout, **env) == [head, False]
        (checkout / "notes.txt").touch()
        assert revision_seen(checkout, **env) == [head, False], "a file outside code and config changes no result"
        (checkout / "conf" / "a.yaml").write_text("a: 2\n")
        assert revision_seen(checkout, **env) == [head, True]

    def test_new_module_is_dirty(self, checkout: Path) -> None:
        (checkout / "eagle3x" / "new.py").touch()
        seen = revision_seen(checkout, PYTHONDONTWRITEBYTECODE="1")
        assert seen is not None
        assert seen[1] is True

    def test_environment_of_a_hook_is_not_believed(self, checkout: Path, tmp_path: Path) -> None:
        head = git(checkout, "rev-parse", "HEAD")
        seen = revision_seen(checkout, GIT_DIR=str(tmp_path / "nowhere"), PYTHONDONTWRITEBYTECODE="1")
        assert seen == [head, False]

    def test_installed_below_somebodys_project(self, checkout: Path) -> None:
        site = checkout / ".venv" / "site-packages"
        shutil.copytree(checkout / "eagle3x", site / "eagle3x")
        assert revision_seen(site) is None

    def test_no_checkout(self, checkout: Path, tmp_path: Path) -> None:
        shutil.copytree(checkout / "eagle3x", tmp_path / "plain" / "eagle3x")
        assert revision_seen(tmp_path / "plain") is None

    def test_no_git_program(self, checkout: Path) -> None:
        assert revision_seen(checkout, PATH="/nowhere") is None


def test_versions_are_those_installed() -> None:
    versions = provenance.package_versions()
    assert versions["numpy"] == version("numpy")
    assert versions["torch"] == version("torch")
    assert set(versions) <= set(provenance.PACKAGES)


def test_host_names_no_machine() -> None:
    host = provenance.host()
    assert host["system"] == platform.system()
    assert isinstance(host["cpus"], int)
    assert host["cpus"] >= 1
    assert isinstance(host["memory_bytes"], int)
    assert host["memory_bytes"] > 2**28
    assert platform.node() not in [str(value) for value in host.values()]


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; import eagle3x.artifacts as a; from eagle3x import provenance as p, commands;"
        "import eagle3x.commands.artifacts; p.package_versions(), p.host(), p.git_revision();"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
