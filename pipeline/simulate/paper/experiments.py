"""All published experiments: their figures and pictures.

Invariant: every published figure is in the result, simulated or with the reason why it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from libra.pipeline.simulate.paper import costs, runs
from libra.pipeline.simulate.paper.judged import Figure, absent
from libra.pipeline.simulate.paper.plots import Plot
from libra.pipeline.simulate.paper.published import PUBLISHED
from libra.pipeline.simulate.paper.runs import Size

QUICK = Size(seeds=1, steps=4, groups=8, rescore=2, points=3)


@dataclass(frozen=True, slots=True)
class Paper:
    """What ``libra simulate paper`` shows: ``figures`` in the order of the published list."""

    figures: tuple[Figure, ...]
    plots: tuple[Plot, ...]

    def count(self, status: str) -> int:
        """Figures of a status."""
        return sum(figure.status == status for figure in self.figures)


def experiments(size: Size | None = None, progress: Callable[[str], None] = lambda _: None) -> Paper:
    """Every published figure, and the main ones as pictures. ``size``: how much is simulated (None: three seeds, two
    to three minutes on a core of 2024; `QUICK`: some seconds, one seed)."""
    size = size or Size()
    parts: dict[str, Callable[[], costs.Part]] = {
        "ablation (the longest part)": lambda: runs.ablation(size, progress),
        "throughput by TP degree and length": costs.throughput,
        "the tail": lambda: runs.tail(size),
        "drift": lambda: runs.drift(size),
        "search time": costs.search_time,
        "growth with length": costs.growth,
        "KV migration": costs.migration,
        "routing": lambda: runs.routing(size),
    }
    figures = [absent(published) for published in PUBLISHED if published.missing]
    plots: list[Plot] = []
    for name, part in parts.items():
        progress(name)
        found, drawn = part()
        figures += found
        plots += drawn
    order = {published.key: i for i, published in enumerate(PUBLISHED)}
    return Paper(tuple(sorted(figures, key=lambda figure: order[figure.published.key])), tuple(plots))
