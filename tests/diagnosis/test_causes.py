"""Kinds of causes: what can be planted can be named, and what can be named has words and a repair."""

from __future__ import annotations

from typing import get_args

from eagle3x.diagnosis import hypotheses
from eagle3x.diagnosis.causes import REPAIRS, Kind
from eagle3x.diagnosis.planted import STAGES, WIDER, Fault, called
from eagle3x.reporting.verdict import SPOKEN


def test_what_can_be_planted_can_be_named() -> None:
    faults = set(get_args(Fault))
    assert {called(fault).kind for fault in faults} <= set(get_args(Kind))
    assert {fault for faults in STAGES.values() for fault in faults} | WIDER.keys() <= faults


def test_what_the_finder_tries_can_be_named() -> None:
    assert set(get_args(hypotheses.Kind)) <= set(get_args(Kind))


def test_every_kind_has_words_and_a_repair() -> None:
    assert set(REPAIRS) == set(SPOKEN) == set(get_args(Kind))
