"""Why keys differ: differences planted in a chain of four stages are found where they began, and only those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3x.artifacts import Artifact, ArtifactSpec, Store
from eagle3x.explanation import ABSENT, Difference, Explanation
from eagle3x.types import ConfigError, EagleError

LR = {"optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "seed": 1}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "artifacts")


def make(store: Store, stage: str, identity: dict[str, Any], version: int = 1, **parents: Artifact) -> Artifact:
    return store.get_or_make(ArtifactSpec(stage, version, identity, parents, {}), lambda work: {})


def chain(store: Store, temperature: float = 0.0, lr: float = 0.001, export_version: int = 1) -> dict[str, Artifact]:
    """prompts <- responses <- drafter <- export, and a benchmark that reads export and responses."""
    made = {"prompts": make(store, "prompts", {"data": "builtin"})}
    made["responses"] = make(store, "responses", {"temperature": temperature}, prompts=made["prompts"])
    made["drafter"] = make(store, "drafter", {"lr": lr}, responses=made["responses"])
    made["export"] = make(store, "export", {}, export_version, drafter=made["drafter"])
    made["benchmark"] = make(store, "benchmark", {"k": 3}, export=made["export"], responses=made["responses"])
    return made


def explained(store: Store, a: Artifact, b: Artifact) -> Explanation:
    return store.explain(a.key, b.key)


def test_own_differences_by_dotted_path(store: Store) -> None:
    a = make(store, "drafter", LR)
    b = make(store, "drafter", {"optimizer": {"lr": 0.002, "betas": [0.9, 0.99]}, "seed": "1", "new": None}, version=2)
    e = explained(store, a, b)
    assert (e.stage, e.key_a, e.key_b, e.parents) == ("drafter", a.key, b.key, ())
    assert set(e.differences) == {
        Difference("version", 1, 2),
        Difference("identity.optimizer.lr", 0.001, 0.002),
        Difference("identity.optimizer.betas.1", 0.95, 0.99),
        Difference("identity.seed", 1, "1"),
        Difference("identity.new", ABSENT, None),
    }


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (True, 1), ([1], [1, 2]), ({"x": 1}, [1]), (None, "None")])
def test_values_that_python_or_a_reader_may_take_for_equal(store: Store, a: Any, b: Any) -> None:
    e = explained(store, make(store, "drafter", {"v": a}), make(store, "drafter", {"v": b}))
    assert [(d.path, d.a, d.b) for d in e.differences] == [("identity.v", a, b)]


def test_followed_down_to_the_first_cause(store: Store) -> None:
    a, b = chain(store), chain(store, temperature=0.7)
    e = explained(store, a["benchmark"], b["benchmark"])
    assert e.differences == ()
    assert [p.stage for p in e.parents] == ["export", "responses"]
    order = e.upstream_first()
    assert [node.stage for node in order] == ["responses", "drafter", "export", "benchmark"]
    assert [node.differences for node in order] == [(Difference("identity.temperature", 0.0, 0.7),), (), (), ()]


def test_several_causes(store: Store) -> None:
    a, b = chain(store), chain(store, lr=0.01, export_version=2)
    order = explained(store, a["benchmark"], b["benchmark"]).upstream_first()
    assert {n.stage: n.differences for n in order} == {
        "drafter": (Difference("identity.lr", 0.001, 0.01),),
        "export": (Difference("version", 1, 2),),
        "benchmark": (),
    }


def test_parent_on_one_side_only(store: Store) -> None:
    """As a pretrained drafter, which reads no states."""
    states = make(store, "hidden_states", {})
    e = explained(store, make(store, "drafter", {}, hidden_states=states), make(store, "drafter", {}))
    assert e.differences == (Difference("parents.hidden_states", states.key, ABSENT),)


def test_dropped_parents_still_tell(store: Store) -> None:
    a, b = chain(store), chain(store, temperature=0.7)
    store.drop([artifact.key for made in (a, b) for artifact in made.values()])
    order = explained(store, a["export"], b["export"]).upstream_first()
    assert order[0].differences == (Difference("identity.temperature", 0.0, 0.7),)


def test_parent_whose_manifest_is_gone(store: Store) -> None:
    a, b = chain(store), chain(store, lr=0.01)
    for file in (store.root / "drafter" / a["drafter"].key).iterdir():
        file.unlink()
    (store.root / "drafter" / a["drafter"].key).rmdir()
    e = explained(store, a["export"], b["export"])
    assert e.differences == (Difference("parents.drafter", a["drafter"].key, b["drafter"].key),)


def test_unfinished_artifact_tells_why_it_is_made(store: Store) -> None:
    a = make(store, "responses", {"temperature": 0.0})

    def fail(work: Path) -> dict[str, Any]:
        raise RuntimeError

    spec = ArtifactSpec("responses", 1, {"temperature": 0.7}, {}, {})
    with pytest.raises(RuntimeError):
        store.get_or_make(spec, fail)
    assert store.explain(a.key, spec.key).differences == (Difference("identity.temperature", 0.0, 0.7),)


def test_same_key(store: Store) -> None:
    a = chain(store)["benchmark"]
    e = explained(store, a, a)
    assert (e.differences, e.parents) == ((), ())


def test_refusals(store: Store) -> None:
    made = chain(store)
    with pytest.raises(ConfigError, match=f"{made['export'].key} is export, .* is drafter: .* one stage"):
        store.explain(made["export"].key, made["drafter"].key)
    with pytest.raises(ConfigError, match="no artifact"):
        store.explain(made["export"].key, "00000000")
    (made["export"].path / "manifest.json").write_text("broken")
    with pytest.raises(EagleError, match="no readable manifest"):
        store.explain(made["export"].key, made["export"].key)
