"""TCP ports of this machine's loopback address."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterable
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOWEST, HIGHEST = 1024, 65535
"""Ports that a server without privileges can have."""
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


def free_port(highest: int = HIGHEST) -> int:
    """A port up to `highest` that nobody holds now. Someone may take it before it is used: a starter must check."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
        if port > highest:  # the system's own choice is above: look further down
            port = random.randint(LOWEST, highest)
            if taken(port):
                continue
        return port


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
