"""SVG elements as text, and the scales that place them.

Invariant: every text and title is escaped; colours and fonts are classes of the page's style.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data from ``low``–``high`` to pixels from ``start``–``end``; logarithmic if ``log``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Round numbers inside the scale, about ``most`` of them."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            candidates = [mantissa * 10.0**power for power in range(first, last + 1) for mantissa in steps]
            return [value for value in candidates if self.low <= value <= self.high]
        step = nice_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``rough`` (above 0)."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(mantissa * power for mantissa in (1, 2, 5, 10) if mantissa * power >= rough * (1 - 1e-9))


def rect(style: str, x: float, y: float, width: float, height: float, title: str) -> str:
    """A bar with a tooltip."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="{style}" {place}><title>{escape(title)}</title></rect>'


def circle(style: str, x: float, y: float, radius: float, title: str) -> str:
    """A dot with a tooltip."""
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(title)}</title></circle>'


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def polyline(style: str, points: list[tuple[float, float]]) -> str:
    """A line through the points."""
    return f'<polyline class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def label(style: str, x: float, y: float, text: str, anchor: Anchor = "start") -> str:
    """A piece of text."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def picture(width: int, height: int, parts: list[str], about: str) -> str:
    """The whole drawing; ``about`` is read aloud in its place."""
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about)}">{"".join(parts)}</svg>'
