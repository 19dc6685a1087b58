"""A small SVG canvas for the report's figures: themed by the page's CSS classes, so light, dark and print all work.

Lengths are in viewBox units; one unit is about one CSS pixel at the figure's natural width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Scale:
    """A linear map from data `[low, high]` to positions `[start, end]`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The position of `value`."""
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About `count` round numbers inside the data range (steps of 1, 2, 2.5 or 5 times a power of ten)."""
        raw = (self.high - self.low) / max(count, 1)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """A range with some air at both ends; never empty."""
    air = (high - low) * share or max(abs(high), 1.0) * share
    return low - air, high + air


@dataclass
class Canvas:
    """Collects SVG elements. `css` arguments are class names of the page's style sheet."""

    width: float
    height: float
    elements: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self.elements.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>')

    def path(self, points: list[tuple[float, float]], css: str) -> None:
        """A line through points."""
        data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.elements.append(f'<path d="{data}" class="{css}"/>')

    def curve(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A smooth link from (x1, y1) down to (x2, y2)."""
        middle = (y1 + y2) / 2
        data = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
        self.elements.append(f'<path d="{data}" class="{css}"/>')

    def rect(self, x: float, y: float, width: float, height: float, css: str, tip: str = "", radius: float = 0) -> None:
        """A box with an optional hover text."""
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="{radius:g}"'
        self.elements.append(f'<rect {shape} class="{css}">{_title(tip)}</rect>')

    def dot(self, x: float, y: float, css: str, tip: str = "", radius: float = 5) -> None:
        """A filled circle: what the engine did."""
        self.elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{css}">{_title(tip)}</circle>')

    def diamond(self, x: float, y: float, css: str, tip: str = "", radius: float = 5.5) -> None:
        """A hollow diamond: what replay predicts."""
        r = radius
        data = f"M{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}L{x - r:.1f} {y:.1f}Z"
        self.elements.append(f'<path d="{data}" class="{css}">{_title(tip)}</path>')

    def text(self, x: float, y: float, content: str, css: str = "label", anchor: Anchor = "start") -> None:
        """One line of text; `y` is its baseline."""
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(content)}</text>'
        )

    def x_axis(self, scale: Scale, y: float, top: float, label: str, ticks: int = 6, digits: int | None = None) -> None:
        """Ticks and grid lines along the bottom, with the axis' name and unit."""
        values = scale.ticks(ticks)
        for value in values:
            x = scale(value)
            self.line(x, top, x, y, "grid")
            self.text(x, y + 16, tick_text(value, values, digits), "tick", "middle")
        self.text((scale.start + scale.end) / 2, y + 34, label, "axis", "middle")

    def y_axis(self, scale: Scale, x: float, right: float, label: str, ticks: int = 5) -> None:
        """Ticks and grid lines along the left, with the axis' name and unit above it."""
        values = scale.ticks(ticks)
        for value in values:
            y = scale(value)
            self.line(x, y, right, y, "grid")
            self.text(x - 8, y + 4, tick_text(value, values), "tick", "end")
        self.text(x, scale.end - 12, label, "axis", "start")

    def render(self, alt: str) -> str:
        """The figure as one inline `<svg>`; `alt` is what a screen reader says."""
        body = "".join(self.elements)
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
            f' role="img" aria-label="{escape(alt)}" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
        )


def tick_text(value: float, values: list[float], digits: int | None = None) -> str:
    """A tick's text, with as many decimals as all of `values` need."""
    if digits is None:
        digits = max((len(f"{v:.6f}".rstrip("0").partition(".")[2]) for v in values), default=0)
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def fitted(text: str, limit: int) -> str:
    """`text` cut in its middle to `limit` characters: the ends of a cell's name tell it from others."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def _title(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""
