"""TCP ports of this machine's loopback address."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable
from pathlib import Path

LOOPBACK = "127.0.0.1"
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


def free_port() -> int:
    """A port that nobody holds now. Someone may take it before it is used: whoever starts a server must check."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def taken(port: int) -> bool:
    """Whether no server can be bound to `port` (connections of a server that ended do not hold it)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
        return False


def listens(pids: Iterable[int], port: int) -> bool:
    """Whether one of the processes `pids` holds the socket that listens on `port`."""
    rows = [
        line.split()
        for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
        if table.exists()
        for line in table.read_text(encoding="ascii").splitlines()[1:]
    ]
    wanted = {f"socket:[{row[9]}]" for row in rows if row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            if any(_link(fd) in wanted for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return True
    return False


def _link(fd: Path) -> str | None:
    with contextlib.suppress(OSError):
        return str(fd.readlink())
    return None
