"""Engine arguments as words of a command line."""

from __future__ import annotations

import pytest

from eagle3x.engines.flags import flags
from eagle3x.types import EagleError

ASKED = {"a_b": True, "c": False, "d": None, "e": {"x": [1, 2]}, "f": "s", "g": 0.5, "h": [1, 2]}
REST = ["--e", '{"x": [1, 2]}', "--f", "s", "--g", "0.5", "--h", "1", "2"]


def test_flags() -> None:
    assert flags(ASKED, "--no-") == ["--a-b", "--no-c", *REST]
    assert flags(ASKED, None) == ["--a-b", *REST]
    with pytest.raises(EagleError, match=r"engine_args\.x: "):
        flags({"x": object()}, None)
