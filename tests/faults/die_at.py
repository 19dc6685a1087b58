"""`python die_at.py make|drop|remake FOLDER`: die at each step of the store's work, one after the other.

A step is a call of the operating system that changes the disk. For n = 1, 2, ... a forked run is killed at its n-th
step, in a store of its own; then the store is looked at, and a second run must finish the work. Ends when a run
survives, and prints how many died.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from pieces import check_whole, made_pieces, maker, spec

from eagle3x.artifacts import Store
from eagle3x.payload import verify
from eagle3x.provenance import git_revision, host, package_versions

STEPS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync")
NAME = "x"


def arm(step: int) -> None:
    """Odd steps: die before the call; even ones: right after it."""
    counter = count(1)

    def deadly(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if next(counter) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in STEPS:
        setattr(os, name, deadly(getattr(os, name)))


def dies(work: Any, step: int) -> bool:
    """Run `work` in a child that is killed at `step`; False if it got through."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            arm(step)
            work()
            status = 0
        finally:
            os._exit(status)
    _, end = os.waitpid(child, 0)
    assert os.WIFSIGNALED(end) or os.WEXITSTATUS(end) == 0, "the run failed by itself"
    return os.WIFSIGNALED(end)


def look(store: Store, story: str) -> None:
    """Nothing half made is visible, nothing is called damaged, and a manifest that was there once stays readable."""
    path = store.root / "hidden_states" / spec(NAME).key
    if path.exists():
        check_whole(path, NAME)
    artifact = store.lookup(spec(NAME))
    states = [e.state for e in store.entries()]
    assert states in ([], ["partial"], ["complete"], ["dropped"]), states
    assert (artifact is not None) == (states == ["complete"]), states
    if story != "make":
        manifest = store.manifest("hidden_states", spec(NAME).key)
        assert manifest is not None
        assert states != []
        if states in (["complete"], ["dropped"]):
            assert manifest.facts == {"pieces": 6}


def live(story: str, folder: Path, step: int) -> bool:
    """One store, one death, one recovery. False if nobody died."""
    store, log = Store(folder / "artifacts"), folder / "log"
    folder.mkdir()

    def make() -> Any:
        return store.get_or_make(spec(NAME), maker(NAME, log))

    def refuse(work: Path) -> Any:
        raise AssertionError("all was there but the last rename: the maker is not to be asked again")

    def drop() -> Any:
        return store.drop([spec(NAME).key])

    if story != "make":
        make()
    if story == "remake":
        drop()
        log.unlink()
    died = dies(drop if story == "drop" else make, step)
    look(store, story)
    if story == "drop":
        drop()
        look(store, story)
        log.unlink()
    lacks_only_its_rename = (store.root / "hidden_states" / f".{spec(NAME).key}.partial" / "manifest.json").exists()
    verify(store.get_or_make(spec(NAME), refuse) if lacks_only_its_rename else make())
    look(store, "remake")
    assert [e.state for e in store.entries()] == ["complete"]
    assert set(Counter(made_pieces(log)).values()) <= {1}, "a finished piece was made again"
    scraps = [p.name for p in (store.root / "hidden_states").iterdir() if p.suffix not in (".lock", "")]
    assert [name for name in scraps if ".trash" in name or ".partial" in name] == []
    return died


if __name__ == "__main__":
    package_versions(), git_revision(), host()  # remembered, so that not every child asks git again
    deaths = 0
    while live(sys.argv[1], Path(sys.argv[2]) / str(deaths), deaths + 1):
        deaths += 1
    print(deaths)
