"""`python guard.py --leash FD [--pass FD] -- ARGV...`: run ARGV, and see to it that nothing of it stays behind.

A program of its own (standard library only, started by its path, nothing of eagle3x imported), because it must outlive
the process that starts it: whoever is killed with SIGKILL can clean up nothing.

`--leash` is one end of a stream socket. The guard first writes ARGV's process id and a newline into it. When the other
end closes (the starter died, or let go on purpose), the guard ends every process below it: SIGTERM, a grace time, then
SIGKILL. Seconds of grace that the starter wrote before it closed (a number and a newline) replace `GRACE`. SIGTERM and
SIGINT to the guard do the same. It is a *subreaper*: what loses its parent becomes its child, so a process that calls
setsid, or forks twice, is still below it. `--pass`: a file descriptor for ARGV alone, which the guard closes.

Exit code: that of ARGV, 128 + n if signal n ended it; what ARGV left running is ended before the guard exits.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL when the starter died without naming another time."""

LEFT_BEHIND_GRACE = 2.0
"""The same, for what ARGV left running when it ended by itself."""

TRACKER_SECONDS = 2.0
"""How long Python's resource trackers may take, once all others are killed, to free the shared memory of these."""

KILL_SECONDS = 30.0
"""How long killed processes may take to disappear: one that waits for a driver cannot die before that answers."""

PARENT_DIED = signal.SIGHUP
TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)
CAUGHT = (PARENT_DIED, *TOLD_TO_END, signal.SIGCHLD)
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def parents() -> dict[int, int]:
    """Parent's process id of every process. Zombies count: one whose main thread ended first looks so while it runs."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(folder.name)] = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return found


def descendants(root: int, parent_of: Mapping[int, int]) -> list[int]:
    """Every process below `root`, which is not among them; parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent in parent_of.items():
        children.setdefault(parent, []).append(pid)
    below = list(children.get(root, ()))
    for pid in below:  # grows while it is read
        below.extend(children.get(pid, ()))
    return below


def prctl(option: int, value: int) -> None:
    """Linux prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal those that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Guard:
    """The one process started, and all that comes from it."""

    def __init__(self, argv: Sequence[str], leash: socket.socket, passed: Sequence[int]) -> None:
        self._leash = leash
        self._parent = os.getppid()
        self._told = False
        self._exit_code: int | None = None
        self._wake, wakeup = os.pipe()
        for end in (self._wake, wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in CAUGHT:
            signal.signal(number, self._caught)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        # Closing the leash tells the same; this one also holds where a fork of the starter keeps its end open.
        prctl(PR_SET_PDEATHSIG, PARENT_DIED)
        self._pid = self._start(argv)
        for fd in passed:
            os.close(fd)
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)

    def run(self) -> int:
        """Wait for ARGV's end, or for the word to end it; returns the exit code."""
        with contextlib.suppress(OSError):  # the starter may be gone already
            self._leash.sendall(b"%d\n" % self._pid)
        grace = LEFT_BEHIND_GRACE
        while self._exit_code is None:
            if self._told or os.getppid() != self._parent:
                grace = GRACE
                break
            if self._sleep(1.0, self._leash):
                grace = self._asked_grace()
                break
            self._reap()
        self._end_all(grace)
        self._reap()
        return 128 + signal.SIGKILL if self._exit_code is None else self._exit_code

    def _start(self, argv: Sequence[str]) -> int:
        """Fork and execute `argv` in a session of its own; returns its process id."""
        guard = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)  # none of ours may reach the fork before it is ready
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                for number in (*CAUGHT, *IGNORED_BY_PYTHON):
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed
                if os.getppid() == guard:
                    os.execvp(argv[0], list(argv))  # noqa: S606 (no shell is wanted)
            except OSError as error:
                say(f"cannot start {argv[0]}: {error.strerror}")
            finally:
                os._exit(127)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
        return pid

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        # A starting *thread* that ended also sends PARENT_DIED: `run` asks who the parent is.
        self._told = self._told or number in TOLD_TO_END

    def _sleep(self, seconds: float, *sources: socket.socket) -> bool:
        """Until a signal, `seconds`, or one of `sources` can be read: True for the last."""
        ready, _, _ = select.select([self._wake, *sources], [], [], seconds)
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        return any(source in ready for source in sources)

    def _asked_grace(self) -> float:
        """Seconds that the starter wrote before it let go; `GRACE` if it died."""
        words = b""
        with contextlib.suppress(ConnectionError):
            while not words.endswith(b"\n") and (part := self._leash.recv(64)):
                words += part
        return float(words) if words.endswith(b"\n") else GRACE

    def _reap(self) -> None:
        """Collect every child that ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._exit_code = code if code >= 0 else 128 - code

    def _end_all(self, grace: float) -> None:
        """End everything below this process: SIGTERM, `grace` seconds, then SIGKILL as long as there is anything."""
        send(self._below(), signal.SIGTERM)
        if self._gone_within(grace):
            return
        left = self._below()
        say(f"killed after {grace:g} s of grace: {', '.join(map(name_of, left))}")
        send((pid for pid in left if not is_tracker(pid)), signal.SIGKILL)
        if self._gone_within(TRACKER_SECONDS):
            return
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            send(self._below(), signal.SIGKILL)
            if self._gone_within(0.05):
                return
        say(f"cannot be killed: {', '.join(map(name_of, self._below()))}")

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._below():
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._sleep(min(left, 0.1))
        return True

    def _below(self) -> list[int]:
        self._reap()
        return descendants(os.getpid(), parents())


def is_tracker(pid: int) -> bool:
    """Whether it is the process that frees what killed processes of Python's multiprocessing leave in /dev/shm."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def say(message: str) -> None:
    """To stderr, which is the log; a full disk must not keep the guard from its work."""
    with contextlib.suppress(OSError):
        os.write(2, f"guard: {message}\n".encode())


def name_of(pid: int) -> str:
    """Process id and name; the command line stays out, since it may hold a secret."""
    with contextlib.suppress(OSError):
        return f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return str(pid)


def main() -> int:
    """Read the command line, and guard what it names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leash", type=int, required=True)
    parser.add_argument("--pass", type=int, action="append", default=[], dest="passed")
    parser.add_argument("argv", nargs="+")
    args = parser.parse_args()
    os.set_inheritable(args.leash, False)
    return Guard(args.argv, socket.socket(fileno=args.leash), args.passed).run()


if __name__ == "__main__":
    sys.exit(main())
