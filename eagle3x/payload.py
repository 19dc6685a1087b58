"""The files of an artifact: put on the disk, measured, checked."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3x.manifest import FileRecord, Manifest, sync_directory
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.artifacts import Artifact

MANIFEST = "manifest.json"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ROOM_TEXT = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)


def record_files(work: Path) -> dict[str, FileRecord]:
    """Size and SHA-256 of all that a maker wrote below `work`, after making sure that it is on the disk.

    EagleError for what would not survive the directory's move: links to directories, sockets, dangling links.
    """
    files: dict[str, FileRecord] = {}
    for folder, folders, names in os.walk(work):
        for path in (Path(folder) / name for name in (*names, *folders)):
            relative = path.relative_to(work).as_posix()
            if relative == MANIFEST:
                raise EagleError(f"a maker must not write {MANIFEST}: it is the store's")
            if path.is_file():
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
                files[relative] = FileRecord(path.stat().st_size, sha256(path))
            elif path.is_symlink() or not path.is_dir():
                raise EagleError(f"an artifact holds files and directories: {path} is neither")
        sync_directory(Path(folder))
    return dict(sorted(files.items()))


def size_fault(path: Path, manifest: Manifest) -> str | None:
    """The first file below `path` that is missing or has another size than the manifest says. Reads no content."""
    for name, file in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return f"{path / name} is missing"
        if size != file.bytes:
            return f"{path / name} has {size} bytes instead of {file.bytes}"
    return None


def content_fault(path: Path, manifest: Manifest) -> str | None:
    """The first file below `path` that is not what was written. Reads everything."""
    fault = size_fault(path, manifest)
    if fault is not None:
        return fault
    for name, file in manifest.files.items():
        if sha256(path / name) != file.sha256:
            return f"{path / name} has changed: its SHA-256 is not that of what was written"
    return None


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def size_on_disk(path: Path) -> int:
    """Bytes of all files below `path`; 0 if it does not exist. Others may be writing or deleting there."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += (Path(folder) / name).stat().st_size
    return total


def last_change(path: Path) -> float:
    """When anything in or below `path` was last written, created or deleted: seconds since the epoch; 0 if it is gone.

    What goes away meanwhile is not looked at.
    """
    times = [0.0]
    for folder, _, names in os.walk(path):
        for place in (Path(folder), *(Path(folder, name) for name in names)):
            with suppress(OSError):
                times.append(place.lstat().st_mtime)
    return max(times)


def last_use(path: Path) -> float:
    """When the artifact in `path` was last used: its manifest's time; while it has none, when it last grew."""
    with suppress(OSError):
        return (path / MANIFEST).stat().st_mtime
    return last_change(path)


def damaged(stage: str, key: str, fault: str) -> EagleError:
    """What to say of an artifact whose payload is not what its manifest says."""
    return EagleError(
        f"{stage} {key} is damaged: {fault}. To make it again, drop it and run the same command:"
        f" python -m eagle3x command=artifacts action=drop 'keys=[\"{key}\"]'"
    )


def verify(artifact: Artifact) -> None:
    """Read every file again and compare its SHA-256. EagleError names the first one that is not what was written."""
    fault = content_fault(artifact.path, artifact.manifest)
    if fault is not None:
        raise damaged(artifact.stage, artifact.key, fault)


def show_bytes(count: int) -> str:
    """For people: 512 B, 1.5 KiB, 35.0 GiB."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def is_no_room(error: BaseException) -> bool:
    """Whether the disk or a quota was full, also where a library wrapped the operating system's error in its own."""
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in NO_ROOM) or NO_ROOM_TEXT.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
