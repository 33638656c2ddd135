"""Charts as inline SVG: lines, histograms, bars and stacked shares.

Invariants: pure functions of numbers; a chart without data says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from libra.pipeline.report import svg
from libra.pipeline.report.svg import Scale

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 22.0, 34.0


@dataclass(frozen=True, slots=True)
class Series:
    """Points to draw in the page's colour number ``color`` (1 to 8); ``faint``: in the background."""

    label: str
    points: Sequence[Point]
    color: int
    style: Literal["line", "dots"] = "line"
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows, its bounds (None: from the data, with a margin) and how its numbers read."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False
    text: Callable[[float], str] = field(default=lambda value: f"{value:,.6g}")


@dataclass(frozen=True, slots=True)
class Marker:
    """A labelled vertical line."""

    at: float
    label: str


def line_chart(series: Sequence[Series], x: Axis, y: Axis, width: int = 1000, height: int = 270) -> str:
    """Lines and dots over common axes, with a legend when there is more than one series."""
    drawn = [(one, [point for point in one.points if all(map(math.isfinite, point))]) for one in series]
    drawn = [(one, points) for one, points in drawn if points]
    if not drawn:
        return nothing()
    horizontal = _scale(x, [at for _, points in drawn for at, _ in points], _LEFT, width - _RIGHT)
    vertical = _scale(y, [value for _, points in drawn for _, value in points], height - _BOTTOM, _TOP)
    parts = _grid(horizontal, vertical, x, y, width, height)
    for one, points in drawn:
        places = [(horizontal(at), vertical(value)) for at, value in points]
        faint = " faint" if one.faint else ""
        if one.style == "line":
            parts.append(svg.polyline(f"line s{one.color}{faint}", places))
        radius = 2.2 if one.faint else 4
        if one.style == "dots" or len(places) == 1:
            for (px, py), (at, value) in zip(places, points, strict=True):
                title = f"{one.label}: {y.text(value)} ({x.label} {x.text(at)})"
                parts.append(svg.circle(f"f{one.color}{faint}", px, py, radius, title))
    legend = _legend([(one.label, one.color, one.faint) for one, _ in drawn]) if len(drawn) > 1 else ""
    return legend + svg.picture(width, height, parts, f"{y.label} by {x.label}")


def histogram(
    edges: Sequence[float],
    counts: Sequence[float],
    x: Axis,
    y: Axis,
    markers: Sequence[Marker] = (),
    tail_from: float = math.inf,
) -> str:
    """Bars between ``edges`` (one more than ``counts``); those from ``tail_from`` on stand out."""
    width, height = 1000, 290
    if not any(counts):
        return nothing()
    horizontal = Scale(edges[0], edges[-1], _LEFT, width - _RIGHT, x.log)
    vertical = Scale(0.0, max(counts) * 1.05, height - _BOTTOM, _TOP + 36)
    parts = _grid(horizontal, vertical, x, y, width, height)
    floor = vertical(0)
    for left, right, number in zip(edges[:-1], edges[1:], counts, strict=True):
        if number:
            start, end, top = horizontal(left), horizontal(right), vertical(number)
            style = "f2" if left >= tail_from else "f1"
            title = f"{x.text(left)} to {x.text(right)}: {number:,.0f}"
            parts.append(svg.rect(style, start + 0.5, top, end - start - 1, floor - top, title))
    parts.extend(_markers(markers, horizontal, floor, width))
    return svg.picture(width, height, parts, f"{y.label} by {x.label}")


def bars(values: Mapping[str, float], x_label: str, y: Axis, color: int = 1) -> str:
    """One bar a name."""
    width, height = 340, 200
    if not any(values.values()):
        return nothing()
    vertical = Scale(0.0, max(values.values()) * 1.05, height - _BOTTOM, _TOP)
    slot = (width - _LEFT - _RIGHT) / len(values)
    thick = min(slot * 0.7, 56.0)
    parts = _rows(vertical, y, width)
    for index, (name, value) in enumerate(values.items()):
        middle, top = _LEFT + slot * (index + 0.5), vertical(value)
        title = f"{name}: {y.text(value)}"
        parts.append(svg.rect(f"f{color}", middle - thick / 2, top, thick, vertical(0) - top, title))
        parts.append(svg.label("tick", middle, height - _BOTTOM + 15, name, "middle"))
    parts.extend(_titles(x_label, y.label, width, height))
    return svg.picture(width, height, parts, f"{y.label} by {x_label}")


def shares(rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, int]) -> str:
    """One bar of 100 % a row, cut into named parts; parts below half a percent are left out of the picture."""
    width, left, thick, gap = 1000, 70.0, 28.0, 12.0
    if not rows:
        return nothing()
    parts: list[str] = []
    for index, (row, cuts) in enumerate(rows.items()):
        top, start = 4 + index * (thick + gap), left
        parts.append(svg.label("row", left - 8, top + thick / 2 + 4, row, "end"))
        for name, share in cuts.items():
            span = share * (width - left - 4)
            if share >= 0.005:
                title = f"{row}, {name}: {100 * share:.1f} %"
                parts.append(svg.rect(f"f{colors[name]}", start, top, span - 1.5, thick, title))
            if span > 42:
                parts.append(svg.label("inside", start + 6, top + thick / 2 + 4, f"{100 * share:.0f} %"))
            start += span
    shown = {name for cuts in rows.values() for name, share in cuts.items() if share >= 0.005}
    legend = _legend([(name, color, False) for name, color in colors.items() if name in shown])
    return legend + svg.picture(width, int(len(rows) * (thick + gap) + 6), parts, "shares of time")


def nothing() -> str:
    """What stands where a chart would, without data."""
    return '<p class="none">nothing recorded</p>'


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if axis.log:
        low = max(low, 1e-12)
        return Scale(low, high if high > low else 2 * low, start, end, log=True)
    if high <= low:
        low, high = (low - 0.5, high + 0.5) if axis.low is None else (low, low + 1)
    margin = 0.0 if axis.whole else 0.06 * (high - low)
    return Scale(low - margin * (axis.low is None), high + margin * (axis.high is None), start, end)


def _grid(horizontal: Scale, vertical: Scale, x: Axis, y: Axis, width: int, height: int) -> list[str]:
    floor = height - _BOTTOM
    parts = _rows(vertical, y, width)
    for tick in horizontal.ticks(8 if width > 500 else 4):
        if not x.whole or float(tick).is_integer():
            parts.append(svg.line("mark", horizontal(tick), floor, horizontal(tick), floor + 4))
            parts.append(svg.label("tick", horizontal(tick), floor + 16, x.text(tick), "middle"))
    return parts + _titles(x.label, y.label, width, height)


def _rows(vertical: Scale, y: Axis, width: int) -> list[str]:
    parts = []
    for tick in vertical.ticks(4):
        parts.append(svg.line("grid", _LEFT, vertical(tick), width - _RIGHT, vertical(tick)))
        parts.append(svg.label("tick", _LEFT - 6, vertical(tick) + 4, y.text(tick), "end"))
    return parts


def _titles(x: str, y: str, width: int, height: int) -> list[str]:
    return [svg.label("axis", width - _RIGHT, height - 3, x, "end"), svg.label("axis", 4, 11, y)]


def _markers(markers: Sequence[Marker], horizontal: Scale, floor: float, width: int) -> list[str]:
    """Vertical lines, each label on the first of three rows where it overlaps no other."""
    parts, ends = [], [0.0] * 3
    for marker in sorted(markers, key=lambda one: one.at):
        place, span = horizontal(marker.at), 6.2 * len(marker.label)
        left = min(max(place - span / 2, _LEFT), width - _RIGHT - span)
        row = next((index for index, end in enumerate(ends) if left >= end), len(ends) - 1)
        ends[row] = left + span + 8
        top = _TOP + 6 + 12 * row
        parts.append(svg.line("marker", place, top + 3, place, floor))
        parts.append(svg.label("tick strong", left, top, marker.label))
    return parts


def _legend(entries: Sequence[tuple[str, int, bool]]) -> str:
    """Names with their colour, the faint ones faintly."""
    items = "".join(
        f'<span><i class="b{color}{" faint" if faint else ""}"></i>{escape(name)}</span>'
        for name, color, faint in entries
    )
    return f'<p class="legend">{items}</p>'
