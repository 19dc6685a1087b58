"""report.md: the report in Markdown, for a pull request or a terminal."""

from __future__ import annotations

import re

from jinja2 import Environment, PackageLoader, StrictUndefined

from eagle3x.reporting.entries import Entry, Table
from eagle3x.reporting.summary import Summary
from eagle3x.reporting.tables import all_tables


def markdown_report(summary: Summary) -> str:
    """The same sentence, tables and values as in report.html, without the figures."""
    environment = Environment(  # noqa: S701 (not HTML; `inline` escapes what Markdown would read)
        loader=PackageLoader("eagle3x.reporting"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"inline": inline, "table": markdown_table, "fence": fence}
    failed = [c for c in summary.cells if c.error is not None]
    return environment.get_template("report.md").render(summary=summary, failed=failed, tables=all_tables(summary))


def markdown_table(table: Table) -> str:
    """A pipe table."""
    lines = [_row([inline(h) for h in table.headers]), _row(["---"] * len(table.headers))]
    lines += [_row([_entry(e) for e in row]) for row in table.rows]
    return "\n".join(lines)


def inline(text: str) -> str:
    """Text that Markdown and HTML leave as it is, on one line."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|#\[\]])", r"\\\1", flat)


def fence(text: str) -> str:
    """A code block that holds any text."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{ticks}text\n{text.rstrip()}\n{ticks}"


def _entry(entry: Entry) -> str:
    text = inline(entry.flat)
    return f"**{text}**" if entry.tone == "bad" else text


def _row(entries: list[str]) -> str:
    return f"| {' | '.join(entries)} |"
