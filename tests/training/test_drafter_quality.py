"""The bigram baseline of benchmarks/drafter_quality.py on a text that can be walked by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/drafter_quality.py"


def sample(tokens: list[int], prompt: int, response: int) -> SimpleNamespace:
    mask = torch.arange(len(tokens))
    return SimpleNamespace(
        token_ids=torch.tensor(tokens), loss_mask=(mask >= prompt) & (mask < prompt + response),
        prompt_tokens=prompt, response_tokens=response,
    )  # fmt: skip


def test_bigrams_walk_as_an_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("drafter_quality", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "drafter_quality", script)
    spec.loader.exec_module(script)
    # Pairs that end in the response: 9>1, 1>2, 2>3, 3>1, 1>2, 2>4. After 2 both 3 and 4 once, so 3; 1 and 2 are most
    # frequent, so 1.
    bigrams = script.Bigrams([sample([8, 9, 1, 2, 3, 1, 2, 4], 2, 6)])
    assert bigrams.best == {9: 1, 1: 2, 2: 3, 3: 1}
    assert bigrams.fallback == 1
    # Response 1 2 3 7 1 2, then 5 3 past its stop. Anchor 1: drafts 2 3 1, two are right, 7 is the bonus. Anchor 7:
    # drafts 1 2 3, two are right though the second is the response's last token; then all are out.
    (counted,) = bigrams.replayed([sample([8, 9, 1, 2, 3, 7, 1, 2, 5, 3], 2, 6)], 3)
    assert (counted.verify_steps, counted.drafted, counted.accepted_at) == (2, 6, (2, 2, 0))
    # Anchor 4 is new: its first draft 1 is wrong, and so on one token a step; the last token is no anchor.
    (counted,) = bigrams.replayed([sample([8, 9, 4, 4, 4, 4, 4], 2, 3)], 2)
    assert (counted.verify_steps, counted.drafted, counted.accepted_at) == (2, 4, (0, 0))
