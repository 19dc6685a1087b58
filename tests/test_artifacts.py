"""The artifact store in one process: keys, reuse, resuming, damage, dropping. Kills and full disks: tests/faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from eagle3x.artifacts import Artifact, ArtifactSpec, Store
from eagle3x.identity import PLACEMENT
from eagle3x.manifest import MASKED
from eagle3x.payload import verify
from eagle3x.types import ConfigError, EagleError

IDENTITY = {"seed": 1, "data": {"val_fraction": 0.1, "source": "builtin"}}
PROMPTS_KEY = "37d500305e2a5d6fc3a6"
"""`printf '{"identity":{"data":{"source":"builtin","val_fraction":0.1},"seed":1},"parents":{},"stage":"prompts",
"version":1}' | sha256sum`, first 20 digits."""
RESPONSES_KEY = "fd68c9125fc02eb41cc5"
"""Of {"identity":{"temperature":0.7},"parents":{"prompts":"37d5..."},"stage":"responses","version":2}, likewise."""


def prompts_spec(**changed: Any) -> ArtifactSpec:
    return ArtifactSpec("prompts", 1, IDENTITY | changed, {}, {"data": {"source": "builtin"}})


def responses_spec(prompts: Artifact, temperature: float = 0.7) -> ArtifactSpec:
    return ArtifactSpec("responses", 2, {"temperature": temperature}, {"prompts": prompts}, {})


def write_two(work: Path) -> dict[str, Any]:
    (work / "train").mkdir(exist_ok=True)
    (work / "train" / "a.bin").write_text("hello")
    (work / "index.json").write_text("{}")
    return {"tokens": 12}


def refuse_to_make(work: Path) -> dict[str, Any]:
    raise AssertionError(f"made again in {work}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "artifacts")


class TestKey:
    def test_known_answer(self, store: Store) -> None:
        prompts = store.get_or_make(prompts_spec(), write_two)
        assert prompts.key == PROMPTS_KEY
        assert prompts.path == store.root / "prompts" / PROMPTS_KEY
        assert responses_spec(prompts).key == RESPONSES_KEY

    def test_order_of_names_is_nothing(self) -> None:
        turned = {"data": {"source": "builtin", "val_fraction": 0.1}, "seed": 1}
        assert ArtifactSpec("prompts", 1, turned, {}, {}).key == PROMPTS_KEY

    def test_same_in_other_processes(self) -> None:
        code = (
            "from eagle3x.artifacts import ArtifactSpec as S;"
            "print(S('prompts', 1, {'seed': 1, 'data': {'val_fraction': 0.1, 'source': 'builtin'}}, {}, {}).key)"
        )
        for seed in ("0", "12345"):
            env = os.environ | {"PYTHONHASHSEED": seed}
            out = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
            assert out.stdout.strip() == PROMPTS_KEY

    def test_each_entry_counts(self, store: Store) -> None:
        prompts = store.get_or_make(prompts_spec(), write_two)
        others = store.get_or_make(prompts_spec(seed=2), write_two)
        specs = [
            prompts_spec(),
            prompts_spec(seed=2),
            prompts_spec(seed="1"),
            prompts_spec(seed=True),
            prompts_spec(seed=None),
            prompts_spec(more=None),
            prompts_spec(data={"val_fraction": 0.2, "source": "builtin"}),
            prompts_spec(data={"val_fraction": 0.1, "source": "jsonl"}),
            prompts_spec(data={"source": "builtin"}),
            prompts_spec(data=[1, 2]),
            prompts_spec(data=[2, 1]),
            ArtifactSpec("prompts", 2, IDENTITY, {}, {}),
            ArtifactSpec("other", 1, IDENTITY, {}, {}),
            ArtifactSpec("prompts", 1, IDENTITY, {"prompts": prompts}, {}),
            ArtifactSpec("prompts", 1, IDENTITY, {"prompts": others}, {}),
            ArtifactSpec("prompts", 1, IDENTITY, {"other": prompts}, {}),
        ]
        assert len({spec.key for spec in specs}) == len(specs)

    def test_config_snapshot_is_not_hashed(self) -> None:
        assert ArtifactSpec("prompts", 1, IDENTITY, {}, {"workers": 7}).key == PROMPTS_KEY

    def test_placement_is_not_hashed(self) -> None:
        @dataclass(frozen=True)
        class Data:
            source: str
            val_fraction: float
            path: Annotated[Path, PLACEMENT]

        def key(data: Data) -> str:
            return ArtifactSpec("prompts", 1, {"data": data, "seed": 1}, {}, {}).key

        assert key(Data("builtin", 0.1, Path("/a"))) == key(Data("builtin", 0.1, Path("/b"))) == PROMPTS_KEY
        assert key(Data("builtin", 0.2, Path("/a"))) != PROMPTS_KEY


class TestMaking:
    def test_makes_once_then_reuses(self, store: Store) -> None:
        assert store.lookup(prompts_spec()) is None
        made = store.get_or_make(prompts_spec(), write_two)
        again = store.get_or_make(prompts_spec(), refuse_to_make)
        elsewhere = Store(store.root).lookup(prompts_spec())
        assert (made.reused, again.reused) == (False, True)
        assert made.manifest == again.manifest
        assert elsewhere == again
        assert (made.path / "train" / "a.bin").read_text() == "hello"
        names = {p.name for p in made.path.parent.iterdir() if not p.name.endswith(".lock")}
        assert names == {made.key}

    def test_manifest(self, store: Store) -> None:
        prompts = store.get_or_make(prompts_spec(), write_two)
        config = {"path": Path("/x"), "betas": (0.9, 1)}
        spec = ArtifactSpec("responses", 2, {"t": (1, 2)}, {"prompts": prompts}, config)
        m = store.get_or_make(spec, write_two).manifest
        assert (m.stage, m.key, m.version, m.identity) == ("responses", spec.key, 2, {"t": [1, 2]})
        assert m.parents == {"prompts": PROMPTS_KEY}
        assert m.config == {"path": "/x", "betas": [0.9, 1]}
        assert m.facts == {"tokens": 12}
        hello = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # sha256sum of "hello"
        assert list(m.files) == ["index.json", "train/a.bin"]
        assert (m.files["train/a.bin"].bytes, m.files["train/a.bin"].sha256) == (5, hello)
        assert m.python == ".".join(map(str, sys.version_info[:3]))
        assert m.ended is not None
        assert m.started <= m.ended

    def test_no_secret_reaches_the_disk(self, store: Store) -> None:
        arguments = {"api_key": "hunter2", "hf_token": "hunter2", "url": "http://bob:hunter2@host", "max_new_tokens": 5}
        spec = ArtifactSpec("prompts", 1, {"engine_args": arguments}, {}, {"backend": {"engine_args": arguments}})

        def look_then_fail(work: Path) -> dict[str, Any]:
            raise RuntimeError

        with pytest.raises(RuntimeError):
            store.get_or_make(spec, look_then_fail)
        everything = [p.read_text() for p in store.root.rglob("*") if p.is_file()]
        assert any("max_new_tokens" in text for text in everything)
        artifact = store.get_or_make(spec, write_two)
        everything += [p.read_text() for p in store.root.rglob("*") if p.is_file()]
        assert not any("hunter2" in text for text in everything)
        kept = artifact.manifest.config["backend"]["engine_args"]
        assert (kept["api_key"], kept["hf_token"], kept["max_new_tokens"]) == (MASKED, MASKED, 5)

    def test_empty_artifact(self, store: Store) -> None:
        assert store.get_or_make(prompts_spec(), lambda work: {}).manifest.files == {}
        assert store.get_or_make(prompts_spec(), refuse_to_make).reused

    def test_failure_keeps_the_pieces(self, store: Store) -> None:
        def fail(work: Path) -> dict[str, Any]:
            (work / "piece").write_text("finished")
            raise RuntimeError("engine died")

        with pytest.raises(RuntimeError, match="engine died"):
            store.get_or_make(prompts_spec(), fail)
        assert store.lookup(prompts_spec()) is None
        assert [e.state for e in store.entries()] == ["partial"]

        def resume(work: Path) -> dict[str, Any]:
            assert (work / "piece").read_text() == "finished"
            return {}

        assert list(store.get_or_make(prompts_spec(), resume).manifest.files) == ["piece"]

    def test_wall_time_adds_up_over_attempts(self, store: Store) -> None:
        def work_for(seconds: float, fail: bool) -> Callable[[Path], Mapping[str, Any]]:
            def make(work: Path) -> dict[str, Any]:
                time.sleep(seconds)
                if fail:
                    raise RuntimeError
                return {}

            return make

        for _ in range(2):
            with pytest.raises(RuntimeError):
                store.get_or_make(prompts_spec(), work_for(0.3, fail=True))
        time.sleep(1.5)  # between attempts nobody works
        wall = store.get_or_make(prompts_spec(), work_for(0.1, fail=False)).manifest.wall_seconds
        assert 0.7 <= wall < 2.1

    def test_maker_sees_an_interrupt_through(self, store: Store) -> None:
        def interrupt(work: Path) -> dict[str, Any]:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.get_or_make(prompts_spec(), interrupt)
        assert not store.get_or_make(prompts_spec(), write_two).reused, "the lock was let go"

    @pytest.mark.parametrize("facts", [{"tau": float("nan")}, {"path": {1, 2}}])
    def test_facts_must_be_json(self, store: Store, facts: dict[str, Any]) -> None:
        with pytest.raises(EagleError, match="facts that no JSON can hold"):
            store.get_or_make(prompts_spec(), lambda work: facts)
        assert store.lookup(prompts_spec()) is None

    @pytest.mark.parametrize("name", ["manifest.json", "link", "dangling", "pipe"])
    def test_payload_that_cannot_be_vouched_for(self, store: Store, tmp_path: Path, name: str) -> None:
        def make(work: Path) -> dict[str, Any]:
            if name == "manifest.json":
                (work / name).write_text("mine")
            elif name == "pipe":
                os.mkfifo(work / name)
            else:
                (work / name).symlink_to(tmp_path if name == "link" else tmp_path / "gone")
            return {}

        with pytest.raises(EagleError, match=name):
            store.get_or_make(prompts_spec(), make)

    def test_linked_file_is_checked_as_a_file(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "weights").write_text("hello")

        def make(work: Path) -> dict[str, Any]:
            (work / "hard").hardlink_to(tmp_path / "weights")
            (work / "soft").symlink_to(tmp_path / "weights")
            return {}

        made = store.get_or_make(prompts_spec(), make)
        assert [f.bytes for f in made.manifest.files.values()] == [5, 5]
        verify(made)

    @pytest.mark.parametrize("root", ["file", "file/below"])
    def test_root_that_cannot_be(self, tmp_path: Path, root: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(EagleError, match="cannot write artifacts to"):
            Store(tmp_path / root).get_or_make(prompts_spec(), write_two)


class TestDamage:
    @pytest.mark.parametrize("fault", ["missing", "cut", "no manifest", "half manifest"])
    def test_never_silently_used(self, store: Store, fault: str) -> None:
        path = store.get_or_make(prompts_spec(), write_two).path
        named = {"missing": "a.bin is missing", "cut": "a.bin has 4 bytes instead of 5"}.get(fault, "manifest.json")
        if fault == "missing":
            (path / "train" / "a.bin").unlink()
        elif fault == "cut":
            (path / "train" / "a.bin").write_text("hell")
        elif fault == "no manifest":
            (path / "manifest.json").unlink()
        else:
            (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-9])
        with pytest.raises(EagleError, match=rf"damaged: .*{named}.*action=drop 'keys=\[\"{PROMPTS_KEY}\"\]'"):
            store.get_or_make(prompts_spec(), refuse_to_make)
        assert [e.state for e in store.entries()] == ["damaged"]
        store.drop([PROMPTS_KEY])
        assert not store.get_or_make(prompts_spec(), write_two).reused
        assert [e.state for e in store.entries()] == ["complete"]

    def test_changed_byte_is_found_by_verify(self, store: Store) -> None:
        made = store.get_or_make(prompts_spec(), write_two)
        verify(made)
        (made.path / "train" / "a.bin").write_text("hellO")
        with pytest.raises(EagleError, match=r"damaged: .*train/a\.bin has changed"):
            verify(made)

    def test_manifest_of_a_newer_version(self, store: Store) -> None:
        path = store.get_or_make(prompts_spec(), write_two).path / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
        with pytest.raises(EagleError, match="schema version 2"):
            store.get_or_make(prompts_spec(), refuse_to_make)


class TestDrop:
    def test_payload_goes_manifest_stays(self, store: Store) -> None:
        made = store.get_or_make(prompts_spec(), write_two)
        dropped = store.drop([made.key[:6]])
        assert [(e.key, e.state) for e in dropped] == [(made.key, "complete")]
        assert not made.path.exists()
        assert store.manifest("prompts", made.key) == made.manifest
        assert [(e.state, e.bytes) for e in store.entries()] == [("dropped", 0)]
        assert store.lookup(prompts_spec()) is None

    def test_remake_replaces_it(self, store: Store) -> None:
        first = store.get_or_make(prompts_spec(), write_two)
        store.drop([first.key])
        second = store.get_or_make(prompts_spec(), lambda work: write_two(work) | {"tokens": 13})
        assert not second.reused
        assert store.manifest("prompts", second.key) == second.manifest
        assert second.manifest.facts == {"tokens": 13}
        assert [e.state for e in store.entries()] == ["complete"]

    def test_twice_is_once(self, store: Store) -> None:
        made = store.get_or_make(prompts_spec(), write_two)
        store.drop([made.key, made.key[:8]])
        store.drop([made.key])
        assert store.manifest("prompts", made.key) == made.manifest

    def test_partial(self, store: Store) -> None:
        def fail(work: Path) -> dict[str, Any]:
            write_two(work)
            raise RuntimeError

        with pytest.raises(RuntimeError):
            store.get_or_make(prompts_spec(), fail)
        store.drop([PROMPTS_KEY])
        assert store.entries() == []

        def make_afresh(work: Path) -> dict[str, Any]:
            assert list(work.iterdir()) == []
            return {}

        store.get_or_make(prompts_spec(), make_afresh)

    def test_unknown_key_drops_nothing(self, store: Store) -> None:
        made = store.get_or_make(prompts_spec(), write_two)
        with pytest.raises(ConfigError, match="no artifact"):
            store.drop([made.key, "0000"])
        assert store.lookup(prompts_spec()) is not None

    def test_not_while_it_is_being_made(self, store: Store) -> None:
        def drop_meanwhile(work: Path) -> dict[str, Any]:
            code = (
                "import sys; from pathlib import Path; from eagle3x.artifacts import Store\n"
                "try: Store(Path(sys.argv[1])).drop([sys.argv[2]])\n"
                "except Exception as error: print(type(error).__name__, error)"
            )
            command = [sys.executable, "-c", code, str(store.root), PROMPTS_KEY]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert said.startswith(f"EagleError prompts {PROMPTS_KEY} is being made by another run"), said
            return write_two(work)

        verify(store.get_or_make(prompts_spec(), drop_meanwhile))

    def test_children_outlive_a_dropped_parent(self, store: Store) -> None:
        prompts = store.get_or_make(prompts_spec(), write_two)
        responses = store.get_or_make(responses_spec(prompts), write_two)
        store.drop([prompts.key])
        remade = store.get_or_make(prompts_spec(), write_two)
        assert store.get_or_make(responses_spec(remade), refuse_to_make).key == responses.key


class TestFind:
    def test_prefix(self, store: Store) -> None:
        made = store.get_or_make(prompts_spec(), write_two)
        assert store.find(PROMPTS_KEY[:4]).key == store.find(PROMPTS_KEY).key == made.key

    def test_too_short_unknown_ambiguous(self, store: Store) -> None:
        with pytest.raises(ConfigError, match="store is empty"):
            store.find("abcd")
        made = store.get_or_make(prompts_spec(), write_two)
        with pytest.raises(ConfigError, match="at least 4"):
            store.find(PROMPTS_KEY[:3])
        with pytest.raises(ConfigError, match=rf"starts with '37d6' \(nearest: prompts {PROMPTS_KEY}"):
            store.find("37d6")
        twin = made.path.with_name(PROMPTS_KEY[:6] + "0" * 14)
        shutil.copytree(made.path, twin)
        with pytest.raises(ConfigError, match=f"{PROMPTS_KEY[:5]} is ambiguous: .*{twin.name}.*{PROMPTS_KEY}"):
            store.find(PROMPTS_KEY[:5])
        assert store.find(PROMPTS_KEY[:7]).key == PROMPTS_KEY

    def test_entries_are_by_stage_and_age(self, store: Store, tmp_path: Path) -> None:
        prompts = store.get_or_make(prompts_spec(), write_two)
        responses = store.get_or_make(responses_spec(prompts), write_two)
        (store.root / "notes.txt").touch()
        (store.root / "prompts" / "notes.txt").touch()
        found = store.entries()
        assert [(e.stage, e.key, e.state) for e in found] == [
            ("prompts", prompts.key, "complete"),
            ("responses", responses.key, "complete"),
        ]
        size = (prompts.path / "manifest.json").stat().st_size
        assert found[0].bytes == 5 + 2 + size
        assert Store(tmp_path / "none").entries() == []
