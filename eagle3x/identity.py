"""What makes a result itself: which config values are hashed, and the hash.

A value is *identity* unless its field is annotated `Annotated[..., PLACEMENT]`: where and how fast work is done
(ports, workers, device indices, paths) never changes what comes out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

PLACEMENT = "placement"
"""Marks a config field that is readable by its stage but not hashed."""


@dataclass(frozen=True)
class Added:
    """Marks a config field that came later. With the value that all results until then were made with, it is not
    hashed: they keep their keys."""

    before: Any


def identity_of(node: Any) -> Any:
    """The hashed part of a config node, as plain JSON values."""
    if is_dataclass(node) and not isinstance(node, type):
        hints = get_type_hints(type(node), include_extras=True)
        marks = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(node)}
        return {
            name: identity_of(getattr(node, name))
            for name, found in marks.items()
            if PLACEMENT not in found and Added(getattr(node, name)) not in found
        }
    if isinstance(node, Mapping):
        return {str(k): identity_of(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [identity_of(v) for v in node]
    if isinstance(node, Path):
        raise TypeError(f"a path has no identity, its content has: {node}")
    return node


def digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON value in canonical form: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def request_seed(seed: int, id: str) -> int:
    """Each request has its own, whatever is asked with it: 31 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}".encode()).digest()[:4], "big") >> 1
