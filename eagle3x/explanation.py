"""Why two keys of one stage differ: the differences between their recipes, followed up to the stages they began in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from eagle3x.manifest import Manifest

ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """`path` is dotted, e.g. `identity.train.learning_rate`; where only one side has a value, the other is `ABSENT`."""

    path: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Explanation:
    """Two artifacts of one stage. `differences`: of their own recipes. `parents`: those whose keys differ."""

    stage: str
    key_a: str
    key_b: str
    differences: tuple[Difference, ...]
    parents: tuple[Explanation, ...]

    def upstream_first(self) -> list[Explanation]:
        """This explanation and those of its parents, each once, parents first: the first causes lead."""
        ordered: dict[tuple[str, str, str], Explanation] = {}
        for parent in self.parents:
            for node in parent.upstream_first():
                ordered.setdefault((node.stage, node.key_a, node.key_b), node)
        ordered[self.stage, self.key_a, self.key_b] = self
        return list(ordered.values())


def explain(a: Manifest, b: Manifest, manifest_of: Callable[[str, str], Manifest | None]) -> Explanation:
    """Compare two artifacts of one stage; `manifest_of(stage, key)` gives their ancestors' manifests."""
    differences = [
        *_differences("version", a.version, b.version),
        *_differences("identity", a.identity, b.identity),
    ]
    parents: list[Explanation] = []
    for stage in sorted({*a.parents, *b.parents}):
        key_a, key_b = a.parents.get(stage, ABSENT), b.parents.get(stage, ABSENT)
        if key_a == key_b:
            continue
        parent_a, parent_b = manifest_of(stage, key_a), manifest_of(stage, key_b)
        if parent_a is None or parent_b is None:
            differences.append(Difference(f"parents.{stage}", key_a, key_b))
        else:
            parents.append(explain(parent_a, parent_b, manifest_of))
    return Explanation(a.stage, a.key, b.key, tuple(differences), tuple(parents))


def _differences(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            yield from _differences(f"{path}.{name}", a.get(name, ABSENT), b.get(name, ABSENT))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{path}.{i}", item_a, item_b)
    elif type(a) is not type(b) or a != b:
        yield Difference(path, a, b)
