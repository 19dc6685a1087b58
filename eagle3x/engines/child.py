"""Programs that eagle3x starts, each below a guard, so that none outlives it (`guard.py` says how)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3x.engines import guard
from eagle3x.engines.log_excerpt import raised
from eagle3x.types import EagleError

REPLY_FD = "EAGLE3X_REPLY_FD"
"""Environment variable that tells a worker which file descriptor takes its replies."""

TAIL_BYTES = 1 << 16
AFTERWARDS = re.compile(r"nanobind: (leaked|this is likely)| - (leaked|\.\.\.) |See https://nanobind")
"""Lines that Triton's bindings print as a process ends, dozens of them: they would hide what it ended by."""
EXIT_SECONDS = 5.0
"""How long a child that closed its pipes may take to exit, so that its exit code can be told."""

SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY)S?$", re.IGNORECASE)


class EngineDied(EagleError):  # noqa: N818 (it says what happened)
    """An engine's process ended when it should not have."""


class Child:
    """A running program, its output appended to a log file. A context manager that ends it with all it started.

    It also ends when this object is forgotten, or when this process dies in any way.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `argv`. `env` is added to this process's environment; `argv` alone inherits `stdin` and `pass_fds`.

        Raises:
            EagleError: the log cannot be written. A program that cannot be started ends with exit code 127.
        """
        self.log = log
        environment = {**os.environ, **(env or {})}
        self._secrets = {v for k, v in environment.items() if SECRET_NAME.search(k) and len(v) >= 8}
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("ab")
        except OSError as error:
            raise EagleError(f"the log {log} cannot be written: {error.strerror}") from error
        self._leash, theirs = socket.socketpair()
        fds = (theirs.fileno(), *pass_fds)
        passed = [word for fd in pass_fds for word in ("--pass", str(fd))]
        with output, theirs:
            self._log_start = output.seek(0, os.SEEK_END)
            self._guard = subprocess.Popen(  # noqa: S603 (what to run is the caller's to choose)
                # -I -S: nothing of this interpreter's packages is needed, and a start takes 20 ms
                [sys.executable, "-I", "-S", guard.__file__, "--leash", str(theirs.fileno()), *passed, "--", *argv],
                stdin=stdin, stdout=output, stderr=output, env=environment, pass_fds=fds, start_new_session=True,
            )  # fmt: skip
        self._group: int | None = None
        with self._leash.makefile("rb") as words:
            line = words.readline()
        if not line:
            raise self.died(f"the guard of {argv[0]}")
        self.pid = self._group = int(line)
        """Process id of the program itself, and of its session."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n if signal n ended it."""
        code = self._guard.poll()
        if code is not None and code < 0:
            self._end_group()
            return 128 - code
        return code

    @property
    def running(self) -> bool:
        """Whether the program has not ended yet."""
        return self.exit_code is None

    def processes(self) -> list[int]:
        """Process ids of the program and of all that it started; some may have ended without having been waited for."""
        return guard.descendants(self._guard.pid, guard.parents())

    def stop(self, grace: float = 10.0) -> None:
        """End the program and everything it started: SIGTERM, `grace` seconds, SIGKILL. Again: does nothing."""
        with contextlib.suppress(OSError):  # the guard has ended, or this was called before
            self._leash.sendall(b"%g\n" % grace)
        self._leash.close()
        try:
            self._guard.wait(grace + guard.KILL_SECONDS + EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
        if self._guard.wait() < 0:
            self._end_group()

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of note that this child wrote, with the values of secret environment variables left out."""
        return "\n".join(self._log_lines()[-lines:])

    def log_end(self) -> str:
        """What the program raised, where its log is and how that ends, to be appended to a sentence about it."""
        why = raised(self._log_lines())
        tail = self.log_tail()
        where = f"its log is {self.log}" + (f" and ends:\n{tail}" if tail else ", and empty")
        return ": " + "\nthen ".join(why) + f"\n{where}" if why else f"; {where}"

    def require_running(self, what: str) -> None:
        """Raise if the program ended.

        Raises:
            EngineDied: `what` ended; says how, and how its log ends.
        """
        if not self.running:
            raise self.died(what)

    def died(self, what: str) -> EngineDied:
        """The error that says that `what` ended, how, what it raised, and how its log ends."""
        return EngineDied(f"{what} {ending(self.exit_code)}{self.log_end()}")

    def _log_lines(self) -> list[str]:
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = max(self._log_start, end - TAIL_BYTES)
            file.seek(start)
            if start > self._log_start:
                file.readline()  # cut in the middle
            text = file.read().decode(errors="replace")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return [line for line in text.splitlines() if not AFTERWARDS.match(line)]

    def _end_group(self) -> None:
        """Once the guard itself was killed, and the program with it: end what of it did not leave its process group."""
        group, self._group = self._group, None  # the number may be given to others later
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Worker(Child):
    """A child that answers requests: JSON lines on its stdin, JSON lines back on the descriptor named by `REPLY_FD`.

    Its stdout and stderr go to the log, so whatever an engine prints cannot be taken for a reply.
    """

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start `argv`; see `Child`."""
        replies, theirs = os.pipe()
        self._replies = os.fdopen(replies, "rb")
        self._answering = False
        try:
            super().__init__(
                argv, log, {**(env or {}), REPLY_FD: str(theirs)}, stdin=subprocess.PIPE, pass_fds=(theirs,)
            )
        finally:
            os.close(theirs)

    def request(self, message: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Send one request, now; the iterator yields its replies up to the one that has `done`, which it leaves out.

        An iterator that is closed before its end ends the worker: what it has still to say would answer the next
        request.

        Raises:
            EagleError: the worker reported an error (it can be asked again), wrote what is no reply, or has not been
                heard out about the request before.
            EngineDied: the worker ended, now or while it answered.
        """
        self.require_running("the worker")
        if self._answering:
            raise EagleError("the worker was asked again before its replies to the request before were read to the end")
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(json.dumps(message).encode() + b"\n")
            self._guard.stdin.flush()
        except BrokenPipeError as error:
            raise self._lost() from error
        self._answering = True
        return self._answers()

    def answered(self, within: float) -> bool:
        """Whether the first reply to the last request is there, or the worker ended; waits at most `within` seconds."""
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        return bool(poll.poll(within * 1000))

    def stop(self, grace: float = 10.0) -> None:
        """End the worker: the end of its stdin tells it first, then as `Child.stop`."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        if not self._answering:  # else it does not read
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(grace)
        super().stop(grace)
        self._replies.close()

    def _answers(self) -> Generator[dict[str, Any]]:
        try:
            while True:
                line = self._replies.readline()
                if not line.endswith(b"\n"):
                    raise self._lost()
                reply = self._parsed(line)
                if "error" in reply:
                    self._answering = False
                    raise EagleError(f"{reply['error']} (the worker's log is {self.log})")
                if reply.get("done"):
                    self._answering = False
                    return
                yield reply
        finally:
            if self._answering:
                self.stop()

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise EagleError(f"the worker wrote {line[:200]!r} where a JSON object belongs{self.log_end()}")
        return reply

    def _lost(self) -> EngineDied:
        """The error for closed pipes, once the exit code is known."""
        try:
            self._guard.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.stop()
            return EngineDied(f"the worker closed its pipes and was ended{self.log_end()}")
        return self.died("the worker")


def ending(exit_code: int | None) -> str:
    """How a program ended, in words."""
    if exit_code is None:
        return "still runs"
    with contextlib.suppress(ValueError):
        if exit_code > 128:
            return f"was ended by {signal.Signals(exit_code - 128).name} (exit code {exit_code})"
    return f"exited with code {exit_code}"
