"""Servers that we start and servers that already run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from eagle3x.engines.child import EngineDied
from eagle3x.engines.ports import free_port, listens, taken
from eagle3x.engines.server import Server
from eagle3x.types import EagleError

SERVER = """
import http.server, subprocess, sys, time
port, unready, status = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    checks = 0
    def do_GET(self):
        Handler.checks += 1
        self.send_response(503 if Handler.checks <= unready else status)
        self.end_headers()
        self.wfile.write(b"%d" % Handler.checks)
    def log_message(self, *args):
        print("asked for", self.path, flush=True)
# It listens in a process of its own, as engines do.
if len(sys.argv) == 4:
    sys.exit(subprocess.call([sys.executable, "-c", *sys.orig_argv[2:], "worker"]))
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Answers 503 to the first `unready` checks, then `status`."""

Argv = Callable[[int], list[str]]


def answering(unready: int = 0, status: int = 200) -> Argv:
    return lambda port: [sys.executable, "-c", SERVER, str(port), str(unready), str(status)]


def python(code: str) -> Argv:
    return lambda port: [sys.executable, "-c", code, str(port)]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture
def running() -> Iterator[str]:
    """URL of a server that somebody else started."""
    port = free_port()
    process = subprocess.Popen(answering()(port), stdout=subprocess.DEVNULL, start_new_session=True)
    while not taken(port):
        assert process.poll() is None
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_server_is_ready_when_its_health_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with Server.launch(answering(unready=3), log=tmp_path / "log", timeout=60) as server:
        assert server.child is not None
        port = int(server.url.removeprefix("http://127.0.0.1:"))
        # three checks were refused and one was not, so this is the fifth question
        assert httpx.get(server.url + "/health", trust_env=False).text == "5"
        server.check()
        pids = server.child.processes()
        assert len(pids) == 2
        assert listens(pids[1:], port)
        assert not listens(pids[:1], port)
    assert gone(pids)
    assert not taken(port)
    server.stop()


def test_a_given_port_is_used(tmp_path: Path) -> None:
    port = free_port()
    with Server.launch(answering(), log=tmp_path / "log", timeout=60, port=port) as server:
        assert server.url == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("highest", [65535, 55535, 32767, 2000])
def test_a_free_port_is_no_higher_than_asked(highest: int) -> None:
    found = {free_port(highest) for _ in range(50)}

    assert max(found) <= highest
    assert min(found) >= 1024
    assert not any(taken(port) for port in found)


def test_a_given_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EagleError, match=f"backend.port={port}: another program listens there"):
            Server.launch(answering(), log=tmp_path / "log", timeout=60, port=port)
    assert not (tmp_path / "log").exists()


def test_a_lost_race_for_a_port_is_run_again(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        tried: list[int] = []

        def argv(port: int) -> list[str]:
            tried.append(port)
            return answering()(other.getsockname()[1] if len(tried) == 1 else port)

        # The first child binds a port that is taken, and dies of it; but its own port is free, so it died of a fault.
        with pytest.raises(EngineDied, match="Address already in use"):
            Server.launch(argv, log=tmp_path / "log", timeout=60)
        assert len(tried) == 1

    blockers: list[socket.socket] = []

    def raced(port: int) -> list[str]:
        if not blockers:  # another program is quicker than our first child
            blockers.append(socket.create_server(("127.0.0.1", port)))
        return answering()(port)

    with Server.launch(raced, log=tmp_path / "log", timeout=60) as server, blockers[0] as blocker:
        assert server.url != f"http://127.0.0.1:{blocker.getsockname()[1]}"


def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    foreign: list[subprocess.Popen[bytes]] = []

    def argv(port: int) -> list[str]:
        if not foreign:
            foreign.append(subprocess.Popen(answering()(port), stdout=subprocess.DEVNULL, start_new_session=True))
            while not taken(port):
                time.sleep(0.02)
        # ours takes its time, while the other already answers
        return [sys.executable, "-c", f"import time; time.sleep(1)\n{SERVER}", str(port), "0", "200"]

    try:
        with Server.launch(argv, log=tmp_path / "log", timeout=60) as server:
            assert server.child is not None
            assert listens(server.child.processes(), int(server.url.rpartition(":")[2]))
    finally:
        os.killpg(foreign[0].pid, signal.SIGKILL)
        foreign[0].wait()


def test_early_death_is_told_at_once_with_the_log(tmp_path: Path) -> None:
    code = "import sys; print('loading'); sys.exit('no GPU found')"
    with pytest.raises(EngineDied) as error:
        Server.launch(python(code), log=tmp_path / "log", timeout=3600)
    assert "exited with code 1" in str(error.value)
    assert str(error.value).endswith(f"its log is {tmp_path / 'log'} and ends:\nloading\nno GPU found")


@pytest.mark.parametrize(
    "argv",
    [answering(status=503), python("import time; print('still loading', flush=True); time.sleep(600)")],
    ids=["unready", "silent"],
)
def test_a_server_that_never_gets_ready(tmp_path: Path, argv: Argv) -> None:
    ports: list[int] = []

    def remembered(port: int) -> list[str]:
        ports.append(port)
        return argv(port)

    with pytest.raises(
        EagleError, match=r"backend\.start_timeout=1\.5: .* not ready within .*\n(still|asked)"
    ) as error:
        Server.launch(remembered, log=tmp_path / "log", timeout=1.5)
    assert not isinstance(error.value, EngineDied)
    assert len(ports) == 1
    assert not taken(ports[0])


def test_death_in_service_is_found_by_check(tmp_path: Path) -> None:
    with Server.launch(answering(), log=tmp_path / "log", timeout=60) as server:
        assert server.child is not None
        os.kill(server.child.pid, signal.SIGKILL)
        while server.child.running:
            time.sleep(0.02)
        with pytest.raises(
            EngineDied, match=rf"the server at {server.url} was ended by SIGKILL(.|\n)*asked for /health"
        ):
            server.check()


def test_an_attached_server_is_left_running(running: str) -> None:
    with Server.attach(running + "/") as server:
        assert server.url == running
        assert server.child is None
        server.check()
    assert httpx.get(running, trust_env=False).status_code == 200


def test_an_attached_server_that_goes_away(tmp_path: Path) -> None:
    with Server.launch(answering(), log=tmp_path / "log", timeout=60) as launched:
        attached = Server.attach(launched.url)
    with pytest.raises(EngineDied, match=rf"{launched.url} \(serve\.backend\.url\) is no longer ready: .*refused"):
        attached.check()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "must be http://HOST:PORT"),
        ("ftp://localhost:8000", "must be http://HOST:PORT"),
        ("http://:8000", "must be http://HOST:PORT"),
        ("http://localhost:8000/v1", "must name the server alone, http://localhost:8000$"),
        ("http://localhost:8000?key=1", "must name the server alone, http://localhost:8000$"),
    ],
)
def test_addresses_that_name_no_server(url: str, said: str) -> None:
    with pytest.raises(EagleError, match=said):
        Server.attach(url)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(EagleError, match=r"serve\.backend\.url: a name or password") as error:
        Server.attach("http://me:hunter22@localhost:8000")
    assert "hunter22" not in str(error.value)


def test_nobody_at_the_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EagleError, match=rf"serve\.backend\.url={url}: no server is ready there .*refused"):
        Server.attach(url)


def test_a_sick_server_is_not_attached(running: str) -> None:
    port = free_port()
    with subprocess.Popen(answering(status=500)(port), stdout=subprocess.DEVNULL, start_new_session=True) as sick:
        while not taken(port):
            time.sleep(0.02)
        with pytest.raises(EagleError, match=r"no server is ready there .*/health answered 500"):
            Server.attach(f"http://127.0.0.1:{port}")
        os.killpg(sick.pid, signal.SIGKILL)
