"""Children end with all that they started, whoever dies first, and say why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3x.engines.child import Child, EngineDied, Worker
from eagle3x.types import EagleError

FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
def start(**how):
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, **how)
    process.stdout.readline()
    return process.pid
pids = [os.getpid(), start(), start(start_new_session=True)]
reader, writer = os.pipe()
if os.fork() == 0:  # a daemon: its parent is gone at once
    os.setsid()
    os.write(writer, b"%d" % start(start_new_session=True))
    os._exit(0)
pids.append(int(os.read(reader, 32)))
print("pids", *pids, flush=True)
time.sleep(600)
"""
"""Four processes that ignore SIGTERM: itself, a child, a child in a session of its own, and a daemon."""

ANSWERS = """
import json, os, subprocess, sys
replies = os.fdopen(int(os.environ["EAGLE3X_REPLY_FD"]), "w")
def reply(**message):
    replies.write(json.dumps(message) + "\\n")
    replies.flush()
for line in sys.stdin:
    request = json.loads(line)
    for i in range(request.get("count", 0)):
        print('{"done": true}', flush=True)
        print('{"error": "not a reply"}', file=sys.stderr, flush=True)
        os.system('echo {}')
        reply(i=i, text=request.get("text"))
        if request.get("die_after") == i:
            replies.write('{"i": ')
            replies.flush()
            os._exit(7)
    if "raw" in request:
        replies.write(request["raw"] + "\\n")
        replies.flush()
    elif "error" in request:
        reply(error=request["error"])
    else:
        reply(done=True)
print("told to end", flush=True)
"""
"""Replies `count` times, and prints all the while what looks like replies."""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def eventually(condition: Callable[[], object]) -> bool:
    """Whether `condition` comes true; a generous limit only ends a test that fails."""
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """A zombie is not alive: in a container nobody may ever collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def family(log: Path) -> list[int]:
    """Process ids that FAMILY printed, once all of them run."""
    assert eventually(lambda: log.exists() and re.search(r"^pids .*\n", log.read_text(), re.M))
    line = re.search(r"^pids (.*)$", log.read_text(), re.M)
    assert line is not None
    pids = [int(word) for word in line[1].split()]
    assert len(set(pids)) == 4
    assert all(map(alive, pids))
    return pids


def test_stop_ends_what_ignores_sigterm_and_what_left_the_session(tmp_path: Path) -> None:
    child = Child(python(FAMILY), tmp_path / "log")
    pids = family(child.log)
    assert child.pid == pids[0]
    assert set(child.processes()) >= set(pids)
    child.stop(grace=0.2)
    assert not any(map(alive, pids))
    assert child.exit_code == 128 + signal.SIGKILL
    assert f"killed after 0.2 s of grace: {pids[0]} (" in child.log_tail()
    child.stop()


def test_shared_memory_of_killed_processes_is_freed(tmp_path: Path) -> None:
    code = (
        "import signal, time; from multiprocessing.shared_memory import SharedMemory\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); memory = SharedMemory(create=True, size=4096)\n"
        "print(memory.name, flush=True); time.sleep(600)"
    )
    with Child(python(code), tmp_path / "log") as child:
        assert eventually(lambda: child.log_tail().startswith("psm_"))
        memory = Path("/dev/shm") / child.log_tail()
        assert memory.exists()
        child.stop(grace=0.2)
        assert not memory.exists()


def test_a_program_whose_main_thread_ended_first_is_waited_for(tmp_path: Path) -> None:
    """/proc shows it as a zombie by then; vLLM's server ends in this way."""
    code = (
        "import ctypes, os, signal, threading, time\n"
        "def last():\n    time.sleep(1); os._exit(5)\n"
        "def told(*_):\n    threading.Thread(target=last).start(); ctypes.CDLL(None).pthread_exit(None)\n"
        "signal.signal(signal.SIGTERM, told); print('up', flush=True)\n"
        "while True: time.sleep(600)"
    )
    child = Child(python(code), tmp_path / "log")
    assert eventually(lambda: child.log_tail() == "up")
    child.stop()
    assert child.exit_code == 5


def test_no_process_outlives_a_starter_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys, time; from pathlib import Path; from eagle3x.engines.child import Child\n"
        "child = Child([sys.executable, '-c', sys.argv[1]], Path(sys.argv[2])); time.sleep(600)"
    )
    starter = subprocess.Popen(python(code, FAMILY, str(log)))
    pids = family(log)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert eventually(lambda: not any(map(alive, pids)))


def test_no_process_outlives_a_starter_whose_fork_holds_its_files(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import os, sys, time; from pathlib import Path; from eagle3x.engines.child import Child\n"
        "child = Child([sys.executable, '-c', sys.argv[1]], Path(sys.argv[2]))\n"
        "fork = os.fork()\n"
        "if fork: print(fork, flush=True)\n"
        "time.sleep(600)"
    )
    starter = subprocess.Popen(python(code, FAMILY, str(log)), stdout=subprocess.PIPE)
    assert starter.stdout is not None
    fork = int(starter.stdout.readline())
    try:
        pids = family(log)
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        assert eventually(lambda: not any(map(alive, pids)))
        assert alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_no_process_outlives_a_child_that_was_killed(tmp_path: Path) -> None:
    with Child(python(FAMILY), tmp_path / "log") as child:
        pids = family(child.log)
        os.kill(child.pid, signal.SIGKILL)
        assert eventually(lambda: not child.running)
        assert not any(map(alive, pids))
        with pytest.raises(EngineDied, match=r"the engine was ended by SIGKILL \(exit code 137\)"):
            child.require_running("the engine")


def test_a_guard_that_was_killed_takes_the_program_along(tmp_path: Path) -> None:
    with Child(python(FAMILY), tmp_path / "log") as child:
        program, worker, *escaped = family(child.log)
        os.kill(parent(program), signal.SIGKILL)
        assert eventually(lambda: not child.running)
        try:
            assert eventually(lambda: not alive(program) and not alive(worker))
        finally:  # nobody watches over these any more
            for pid in escaped:
                os.kill(pid, signal.SIGKILL)


def test_a_forgotten_child_ends(tmp_path: Path) -> None:
    child = Child(python("import time; print('up', flush=True); time.sleep(600)"), tmp_path / "log")
    pid = child.pid
    assert alive(pid)
    with pytest.warns(ResourceWarning):  # from subprocess: it has not been waited for
        del child
    assert eventually(lambda: not alive(pid))


def test_a_child_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:  # its end sends the guard the signal that also tells of its parent's death
        worker = pool.submit(Worker, python(ANSWERS), tmp_path / "log").result()
    with worker:
        time.sleep(0.3)  # long enough for a guard that would take it so
        assert list(worker.request({"count": 1})) == [{"i": 0, "text": None}]


def test_the_error_has_exit_code_log_and_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "engine.log"
    log.parent.mkdir()
    log.write_text("of a run before\n")
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit('no memory')"
    with Child(python(code), log) as child:
        assert eventually(lambda: not child.running)
        with pytest.raises(EngineDied) as error:
            child.require_running("vLLM for the benchmark")
        lines = str(error.value).splitlines()
        assert lines[0] == f"vLLM for the benchmark exited with code 1; its log is {log} and ends:"
        assert lines[1:] == [*(f"line {i}" for i in range(76, 100)), "no memory"]
        assert child.log_tail(lines=2) == "line 99\nno memory"
    assert log.read_text().startswith("of a run before\nline 0\n")


def test_what_was_raised_is_told_first_and_without_secrets(tmp_path: Path) -> None:
    code = (
        "try:\n    raise RuntimeError('no kernel for hf_abcdefgh')\n"
        "except RuntimeError:\n    raise ValueError('no graph')"
    )
    shutdown = "import atexit\natexit.register(lambda: [print('shutdown', i) for i in range(40)])\n"
    with Child(python(shutdown + code), tmp_path / "log", {"HF_TOKEN": "hf_abcdefgh"}) as child:
        assert eventually(lambda: not child.running)
        with pytest.raises(EngineDied) as error:
            child.require_running("the engine")
    lines = str(error.value).splitlines()
    assert lines[:3] == [
        "the engine exited with code 1: RuntimeError: no kernel for ***",
        "then ValueError: no graph",
        f"its log is {tmp_path / 'log'} and ends:",
    ]
    assert lines[-1] == "shutdown 39"


def test_what_tritons_bindings_print_at_the_end_is_left_out(tmp_path: Path) -> None:
    after = [
        "nanobind: leaked 2 types!",
        ' - leaked type "X"',
        " - ... skipped remainder",
        "nanobind: this is likely caused by",
        "See https://nanobind.readthedocs.io",
    ]
    code = f"print('IndexError: index out of range'); print({chr(10).join(after)!r}); raise SystemExit(1)"
    with Child(python(code), tmp_path / "log") as child:
        assert eventually(lambda: not child.running)
        assert child.log_tail() == "IndexError: index out of range"


def test_the_log_of_a_run_before_is_not_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an old error\n")
    with Child(python("raise SystemExit(3)"), log) as child:
        assert eventually(lambda: not child.running)
        with pytest.raises(EngineDied, match=rf"exited with code 3; its log is {log}, and empty$"):
            child.require_running("the engine")


def test_secrets_reach_the_child_but_no_message(tmp_path: Path) -> None:
    code = "import os; print('token', os.environ['HF_TOKEN'])"
    with Child(python(code), tmp_path / "log", {"HF_TOKEN": "hf_abcdefgh"}) as child:
        assert eventually(lambda: not child.running)
        assert (tmp_path / "log").read_text() == "token hf_abcdefgh\n"
        assert child.log_tail() == "token ***"


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with Child(["/no/such/python"], tmp_path / "log") as child:
        assert eventually(lambda: not child.running)
        with pytest.raises(
            EngineDied, match=r"code 127;(.|\n)*cannot start /no/such/python: No such file or directory"
        ):
            child.require_running("the engine")


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EagleError, match="cannot be written"):
        Child(python("pass"), tmp_path / "file" / "log")


def test_what_an_engine_prints_is_no_reply(tmp_path: Path) -> None:
    with Worker(python(ANSWERS), tmp_path / "log") as worker:
        assert list(worker.request({"count": 3, "text": "ä\n"})) == [{"i": i, "text": "ä\n"} for i in range(3)]
        assert list(worker.request({})) == []
    assert worker.log.read_text().count('{"done": true}') == 3
    assert worker.log.read_text().endswith("told to end\n")
    assert worker.exit_code == 0


def test_a_request_larger_than_a_pipe(tmp_path: Path) -> None:
    with Worker(python(ANSWERS), tmp_path / "log") as worker:
        text = "x" * 1_000_000
        assert list(worker.request({"count": 2, "text": text})) == [{"i": 0, "text": text}, {"i": 1, "text": text}]


def test_a_reported_error_leaves_the_worker_in_service(tmp_path: Path) -> None:
    with Worker(python(ANSWERS), tmp_path / "log") as worker:
        with pytest.raises(EagleError, match=re.escape(f"out of cache blocks (the worker's log is {worker.log})")):
            list(worker.request({"count": 1, "error": "out of cache blocks"}))
        assert list(worker.request({"count": 1})) == [{"i": 0, "text": None}]


def test_death_in_the_middle_of_a_reply(tmp_path: Path) -> None:
    with Worker(python(ANSWERS), tmp_path / "log") as worker:
        replies = worker.request({"count": 3, "die_after": 1})
        assert [next(replies)["i"], next(replies)["i"]] == [0, 1]
        with pytest.raises(EngineDied, match="the worker exited with code 7"):
            next(replies)
        with pytest.raises(EngineDied, match="the worker exited with code 7"):
            worker.request({"count": 1})


def test_death_is_seen_though_a_child_of_the_worker_holds_the_pipe(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; sys.stdin.readline()\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)\n"
        "os.kill(os.getpid(), 11)"
    )
    with (
        Worker(python(code), tmp_path / "log") as worker,
        pytest.raises(EngineDied, match="the worker was ended by SIGSEGV"),
    ):
        list(worker.request({}))


def test_a_worker_that_closes_its_pipe_is_ended(tmp_path: Path) -> None:
    code = "import os, time; os.close(int(os.environ['EAGLE3X_REPLY_FD'])); time.sleep(600)"
    with Worker(python(code), tmp_path / "log") as worker:
        with pytest.raises(EngineDied, match="closed its pipes and was ended"):
            list(worker.request({}))
        assert not worker.running


@pytest.mark.parametrize("raw", ["no json", "[1]", ""])
def test_what_is_no_json_object_is_refused_and_ends_the_worker(tmp_path: Path, raw: str) -> None:
    with Worker(python(ANSWERS), tmp_path / "log") as worker:
        with pytest.raises(EagleError, match="where a JSON object belongs"):
            list(worker.request({"raw": raw}))
        assert not worker.running


def test_replies_left_unread_are_never_taken_for_those_of_the_next_request(tmp_path: Path) -> None:
    with Worker(python(ANSWERS), tmp_path / "log") as worker:
        replies = worker.request({"count": 3, "text": "first"})
        assert next(replies)["i"] == 0
        with pytest.raises(EagleError, match="asked again before"):
            worker.request({"count": 1, "text": "second"})
        assert next(replies) == {"i": 1, "text": "first"}
        replies.close()
        assert not worker.running
        with pytest.raises(EngineDied):
            worker.request({"count": 1, "text": "second"})
