"""What the driver says of the GPU, without torch."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3x.config import Hardware

MIB = 1024**2


def compute_capability(hardware: Hardware) -> str | None:
    """Compute capability ("9.0") of the GPU that is to be used; None if there is no such GPU."""
    return _asked("compute_cap", hardware)


def gpu_memory_bytes(hardware: Hardware) -> int:
    """Memory of the GPU that is to be used; 0 if there is no such GPU."""
    found = _asked("memory.total", hardware)
    return int(found) * MIB if found else 0


def _asked(field: str, hardware: Hardware) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    index = hardware.devices[0] if hardware.devices else 0
    asked = [tool, f"--id={index}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout  # noqa: S603
    except (subprocess.SubprocessError, OSError):
        return None
    words = answer.split()
    return words[0] if words else None
