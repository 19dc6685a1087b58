"""SIGKILL at random moments and at every single step: no half artifact, no finished piece made again."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pieces
import pytest
from pieces import PIECES, check_whole, made_pieces, maker, spec

from eagle3x.artifacts import Store
from eagle3x.payload import verify

HERE = Path(__file__).parent
KILLS = 20
SECONDS = 0.02
"""Per piece."""


def launch(root: Path, log: Path, name: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, pieces.__file__, str(root), str(log), name, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ready(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """The run has imported everything and is about to ask the store."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def seconds_to_make(folder: Path) -> float:
    """Of a run that nobody kills, on this machine, now."""
    process = ready(launch(folder, folder / "log", "calibration", SECONDS))
    begun = time.monotonic()
    assert process.wait(timeout=60) == 0
    return time.monotonic() - begun


def visible(root: Path) -> list[Path]:
    """What a reader of the store may take for an artifact."""
    return [p for p in (root / "hidden_states").glob("*") if not p.name.startswith(".")]


def test_twenty_random_kills(tmp_path: Path) -> None:
    """Each artifact is killed again and again until a run gets through; then the next one is begun."""
    root, log = tmp_path / "artifacts", tmp_path / "log"
    store, moments = Store(root), random.Random(20)
    longest = seconds_to_make(tmp_path / "calibration")
    kills = finished = late_kills = 0
    while kills < KILLS:
        name = f"artifact{finished}"
        process = ready(launch(root, log, name, SECONDS))
        time.sleep(moments.uniform(0.0, longest))
        process.kill()
        said, _ = process.communicate(timeout=60)
        kills += process.returncode == -9
        late_kills += process.returncode == -9 and f"{name} 0" in made_pieces(log)
        whole = visible(root)
        assert len(whole) in (finished, finished + 1)
        for path in whole:
            check_whole(path, name if path.name == spec(name).key else _name_of(path, finished))
        if store.lookup(spec(name)) is not None:
            finished += 1
        else:
            assert process.returncode == -9, said
            assert [e.state for e in store.entries() if e.key == spec(name).key] in ([], ["partial"])

    last = store.get_or_make(spec(f"artifact{finished}"), maker(f"artifact{finished}", log))
    verify(last)
    assert last.manifest.facts == {"pieces": PIECES}
    assert [e.state for e in store.entries()] == ["complete"] * (finished + 1)
    assert set(Counter(made_pieces(log)).values()) == {1}, "a finished piece was made again"
    assert late_kills >= 5, "the kills came too early to test anything"


def _name_of(path: Path, finished: int) -> str:
    return next(f"artifact{i}" for i in range(finished + 1) if spec(f"artifact{i}").key == path.name)


@pytest.mark.parametrize("story", ["make", "drop", "remake"])
def test_killed_at_every_step(tmp_path: Path, story: str) -> None:
    """`die_at.py` kills a run before, and another after, each call that changes the disk, and looks at what is left."""
    done = subprocess.run(
        [sys.executable, str(HERE / "die_at.py"), story, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= {"make": 40, "drop": 12, "remake": 40}[story], "fewer deaths than there are steps"


def test_two_at_once_make_once(tmp_path: Path) -> None:
    root, log = tmp_path / "artifacts", tmp_path / "log"
    both = [launch(root, log, "shared", seconds=0.5) for _ in range(2)]
    ends = [process.communicate(timeout=60) for process in both]
    assert sorted(out.split() for out, _ in ends) == [["ready", "made"], ["ready", "reused"]]
    said = [err for _, err in ends]
    key = spec("shared").key
    assert sorted(f"waiting for another run that makes hidden_states {key}" in err for err in said) == [False, True]
    assert Counter(made_pieces(log)) == {f"shared {i}": 1 for i in range(PIECES)}
    check_whole(root / "hidden_states" / key, "shared")


def test_who_waits_takes_over_from_the_dead(tmp_path: Path) -> None:
    root, log = tmp_path / "artifacts", tmp_path / "log"
    first = launch(root, log, "shared", seconds=1.0)
    while len(made_pieces(log)) < 1:
        time.sleep(0.01)
    second = ready(launch(root, log, "shared", seconds=0.0))
    assert second.stderr is not None
    assert second.stderr.readline().startswith("waiting for another run that makes")
    first.kill()
    first.communicate(timeout=60)
    out, err = second.communicate(timeout=60)
    assert (out.strip(), "going on from what an earlier attempt left" in err) == ("made", True)
    assert Counter(made_pieces(log)) == {f"shared {i}": 1 for i in range(PIECES)}
    manifest = Store(root).entries()[0].manifest
    assert manifest is not None
    assert manifest.wall_seconds > 1.0, "what the killed run worked counts"
