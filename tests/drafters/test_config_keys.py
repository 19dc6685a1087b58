"""docs/drafters.md shows the table of config keys as the code has it."""

from __future__ import annotations

from pathlib import Path

from eagle3x.drafters.config_keys import KEYS

DOCS = Path(__file__).parent.parent.parent / "docs" / "drafters.md"


def lines() -> list[str]:
    """The table's rows: used, then allowed one value, then ignored, each in the code's order."""
    rows: list[str] = []
    for use in ("used", "only", "ignored"):
        for name, key in KEYS.items():
            if key.use == use:
                values = " or ".join(f"`{value}`" for value in key.values) or "absent"
                rows.append(f"| `{name}` | {f'only {values}' if use == 'only' else use} | {key.why} |")
    return rows


def test_the_documented_table_is_the_codes() -> None:
    shown = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    start = shown.index(lines()[0])
    assert shown[start : start + len(KEYS)] == lines()
