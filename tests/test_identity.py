"""What is hashed, and that the hash is the one that anybody can compute."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest

from eagle3x.composition import cells
from eagle3x.identity import PLACEMENT, Added, digest, identity_of
from eagle3x.schema import config


@config
class Node:
    value: int
    where: Annotated[str | None, PLACEMENT]


def test_placement_is_left_out() -> None:
    assert identity_of(Node(value=1, where="/a")) == {"value": 1}
    assert digest(identity_of(Node(value=1, where="/a"))) == digest(identity_of(Node(value=1, where=None)))
    assert digest(identity_of(Node(value=1, where=None))) != digest(identity_of(Node(value=2, where=None)))


def test_a_field_that_came_later_leaves_old_keys_as_they_are() -> None:
    @config
    class Grown:
        value: int
        more: Annotated[tuple[float, ...], Added((0.0,))]

    assert identity_of(Grown(value=1, more=(0.0,))) == identity_of(Node(value=1, where=None))
    assert identity_of(Grown(value=1, more=(0.0, 1.0))) == {"value": 1, "more": [0.0, 1.0]}
    cfg = cells([], multirun=False)[0].config
    assert not {"temperatures", "top_p"} & identity_of(cfg.benchmark).keys()
    assert "loss" not in identity_of(cfg.train)
    assert identity_of(replace(cfg.train, loss="lk"))["loss"] == "lk"


def test_digest_is_sha256_of_canonical_json() -> None:
    assert digest({"b": [1, 2.5], "a": None}) == hashlib.sha256(b'{"a":null,"b":[1,2.5]}').hexdigest()
    assert digest({"x": 1, "y": 2}) == digest({"y": 2, "x": 1})


def test_paths_have_no_identity() -> None:
    with pytest.raises(TypeError, match="content"):
        identity_of({"p": Path("/x")})


def test_where_work_is_done_is_not_hashed() -> None:
    cfg = cells([], multirun=False)[0].config
    moved = replace(cfg.backend, python="/usr/bin/python3", port=1234, memory_fraction=0.5)
    assert identity_of(moved) == identity_of(cfg.backend)
    assert identity_of(replace(cfg.backend, batch_size=7)) != identity_of(cfg.backend)
