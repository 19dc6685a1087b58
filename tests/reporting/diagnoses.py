"""Diagnoses made by hand, as diagnosis.json holds them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

RUNGS = ("trained", "exported", "responses", "states", "served")
DIED = (
    "the server at http://127.0.0.1:1 was ended by SIGKILL (exit code 137): RuntimeError: no kernel; sorry\n"
    "then Exception: Capture cuda graph failed\nits log is /logs/serve.log and ends:\n  File x.py, line 436\nshutdown"
)


def interval(value: float, half: float = 0.01) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def diagnosis(
    taus: tuple[float | None, ...] = (1.6, 1.6, 1.6, 1.6, 1.6),
    skipped: str = DIED,
    broken: tuple[str, ...] = (),
    unsure: tuple[str, ...] = (),
    causes: tuple[tuple[str, str, float], ...] = (),
    grid: dict[str, float] | None = None,
    hypothetical: bool = True,
) -> dict[str, Any]:
    """`taus` by rung, None where it was skipped; `causes`: kind, rung, loss; `grid`: effects of the 2x2."""
    rungs = [
        {"name": name, "what": f"{name} text", "tau": None if tau is None else interval(tau, 0.1),
         "skipped": skipped if tau is None else None}
        for name, tau in zip(RUNGS, taus, strict=True)
    ]  # fmt: skip
    climbed = [(name, tau) for name, tau in zip(RUNGS, taus, strict=True) if tau is not None]
    verdicts = {**dict.fromkeys(broken, "broken"), **dict.fromkeys(unsure, "cannot tell")}
    steps = [
        {"rung": here, "above": above, "difference": interval(tau - before), "p_holm": 0.5, "threshold": 0.03,
         "detectable": 0.01, "verdict": verdicts.get(here, "sound"), "prompts_needed": 240 if here in unsure else None}
        for (above, before), (here, tau) in pairwise(climbed)
    ]  # fmt: skip
    effects = {name: {**interval(value), "p_holm": 0.01, "detectable": 0.01} for name, value in (grid or {}).items()}
    corners = ("right_plain", "shifted_plain", "right_served", "shifted_served")
    return {
        "rungs": rungs, "steps": steps, "prompts": 100, "broken": list(broken), "largest": None, "earliest": None,
        "claimed": [2, 14, 26], "said_by": None, "fed": [2, 14, 26] if hypothetical else [3, 15, 27],
        "offset_quantization": None if grid is None else {
            "right": [2, 14, 26], "shifted": [3, 15, 27], "hypothetical": hypothetical,
            "taus": {name: interval(1.5) for name in corners}, **effects,
        },
        "slots": [], "break_even": None, "drift": None, "train_gap": None, "estimate": None, "finder": None,
        "causes": [
            {"kind": kind, "rung": rung, "sentence": "seen", "lost": interval(lost), "repair": f"mend {kind}"}
            for kind, rung, lost in causes
        ],
    }  # fmt: skip
