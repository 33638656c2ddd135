"""Pictures of the published experiments, as data: lines that were simulated, dots that were published, or bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra.pipeline.report.charts import Axis, Series, line_chart

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    """``lines`` and ``dots`` by name, over (``x``, ``y``)."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    dots: Mapping[str, Points] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "title": self.title, "x": self.x, "y": self.y,
            "lines": {name: [list(point) for point in points] for name, points in self.lines.items()},
            "dots": {name: [list(point) for point in points] for name, points in self.dots.items()},
        }  # fmt: skip

    def drawn(self) -> str:
        """The picture as inline SVG with its legend."""
        series = [Series(name, points, 1 + i) for i, (name, points) in enumerate(self.lines.items())]
        series += [
            Series(name, points, 1 + (len(series) + i) % 8, "dots")
            for i, (name, points) in enumerate(self.dots.items())
        ]
        low = None if self.log_y else 0.0
        return line_chart(series, Axis(self.x, self.log_x), Axis(self.y, self.log_y, low))
