"""Where engines' processes put captured states for their reader."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from eagle3x.types import EagleError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (made private by mkdtemp)
SCRATCH = "eagle3x-states-"


class ScratchFolder:
    """A private folder for `needed` bytes that come and go, in shared memory if it has the room; removed at the end.

    Folders that a killed process left behind are removed first.
    """

    def __init__(self, needed: int, lower: str) -> None:
        """Make it. EagleError if no place has `needed` bytes; `lower`: the engine argument that makes them fewer."""
        for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
            if parent.is_dir():
                _sweep(parent)
                if shutil.disk_usage(parent).free > needed:
                    self.path = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=parent))
                    return
        raise EagleError(
            f"captured states need {needed / 1024**3:.1f} GiB of scratch space in {SHARED_MEMORY} or"
            f" {tempfile.gettempdir()}: make room, set TMPDIR to another folder, or lower"
            f" backend.engine_args.{lower}"
        )

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{SCRATCH}*"):
        pid = re.match(rf"{SCRATCH}(\d+)-", folder.name)
        if pid is not None and not Path(f"/proc/{pid[1]}").exists():
            with suppress(OSError):
                shutil.rmtree(folder)
