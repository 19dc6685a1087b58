"""When a control is diagnosed right: the planted kinds and no other, and of a wider kind the fault's own words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eagle3x.diagnosis.planted import Fault
from eagle3x.reporting.summary import Control

FC, NORM = "fc.weight is zero", "norm.weight is 1 everywhere, as if it had never been loaded"
HIDDEN = "midlayer.hidden_norm.weight is 1 everywhere"


@pytest.mark.parametrize(
    ("planted", "causes", "right"),
    [
        ([], [], True),
        ([], [("rope_base", "x")], False),
        (["d2t_shifted"], [("d2t_shifted", "x")], True),
        (["d2t_shifted"], [("d2t_missing", "x")], False),
        (["d2t_shifted"], [("d2t_shifted", "x"), ("rope_base", "x")], False),
        (["captured_late"], [("offset_training", "it was trained on 4, 16, 28")], True),
        (["captured_late"], [("offset_serving", "x")], False),
        (["captured_late", "d2t_shifted"], [("d2t_shifted", "x"), ("offset_training", "x")], True),
        (["captured_late", "d2t_shifted"], [("offset_training", "x")], False),
        (["fc_lost"], [("export_changed", FC)], True),
        (["final_norm_lost"], [("export_changed", FC)], False),
        (["final_norm_lost"], [("export_changed", HIDDEN)], False),
        (["fc_lost", "final_norm_lost"], [("export_changed", f"{FC}; {NORM}")], True),
        (["fc_lost", "final_norm_lost"], [("export_changed", NORM)], False),
    ],
)
def test_right(planted: Sequence[Fault], causes: Sequence[tuple[str, str]], right: bool) -> None:
    kinds, sentences = tuple(kind for kind, _ in causes), tuple(said for _, said in causes)
    assert Control("cell", tuple(planted), kinds, sentences, (), None, None).right is right
