"""What is read of the hub's answers and cards; the hub itself is asked by nobody here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3x import hub

CARDS = {
    "---\nlicense: apache-2.0\ntags: [a]\n---\n# A model": "apache-2.0",
    "---\nlicense: other\nlicense_name: llama3.1\nlicense_link: LICENSE\n---\n": "llama3.1",
    "---\ntags: [a]\n---\n# A model": None,
    "# A model without a header": None,
    "---\nlicense: [\n---\n": None,
}


@pytest.mark.parametrize("card", CARDS)
def test_the_licence_is_what_the_card_says(card: str, tmp_path: Path) -> None:
    assert hub.licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text(card)
    assert hub.licence_of(tmp_path) == CARDS[card]


@pytest.fixture
def forgotten() -> Iterator[None]:
    hub.dataset.cache_clear()
    yield
    hub.dataset.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_a_branch_is_looked_up_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def moving(_: Any, hub_id: str, revision: str | None) -> Any:
        asked.append((hub_id, revision))
        return SimpleNamespace(sha=f"commit-{len(asked)}", card_data={"license": "mit"})

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", moving)
    assert [hub.dataset("a/b", None) for _ in range(3)] == [hub.Dataset("commit-1", "mit")] * 3
    assert hub.dataset("a/b", "v1").commit == "commit-2"
    assert asked == [("a/b", None), ("a/b", "v1")]
