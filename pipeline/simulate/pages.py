"""Reports as one offline HTML file: no script, no font, no address outside the file; bars and lines are inline SVG.

Invariant: all text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from libra.pipeline.simulate.jobs import Shared
from libra.pipeline.simulate.replay import Replay
from libra.pipeline.simulate.scenario import Scenario
from libra.pipeline.simulate.variants import Compared

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5c6878;--line:#d8dee6;--bar:#3867d6;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e8ecf1;--soft:#9aa7b8;--line:#333d4b;--bar:#7ea3ff;--paper:#141a22}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:70rem;margin:2rem
auto;padding:0 1rem} table{border-collapse:collapse;width:100%;margin:1rem 0}th,td{padding:.35rem
.6rem;border-bottom:1px solid var(--line);text-align:left}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}small,p{color:var(--soft)}svg{width:100%;height:auto} svg
text{fill:var(--ink);font:12px system-ui,sans-serif}svg rect{fill:var(--bar)}svg line{stroke:var(--ink)} svg
polyline{fill:none;stroke:var(--bar);stroke-width:1.6}
"""
_COLOURS = (
    "#3867d6",
    "#e17055",
    "#20a06b",
    "#a55eea",
    "#c79a16",
    "#2d98da",
    "#eb3b5a",
    "#778ca3",
    "#0fb9b1",
    "#8854d0",
)


def comparison_rows(results: Sequence[Compared]) -> list[dict[str, Any]]:
    """Plain values a policy."""
    return [
        {
            "policy": each.variant,
            "tokens_per_s_per_gpu": each.throughput,
            "spread": each.spread,
            "step_seconds": each.step_seconds,
            "seeds": len(each.results),
            "accuracy": [r.accuracy for r in each.results],
            "moved": [r.moved for r in each.results],
            "changes": [r.changes for r in each.results],
            "failed": [r.failed for r in each.results],
            "restarts": [r.restarts for r in each.results],
            "cancelled": [r.cancelled for r in each.results],
            "throughputs": [r.throughput for r in each.results],
            "steps": [[s.seconds for s in r.steps] for r in each.results],
        }
        for each in results
    ]


def comparison_page(scenario: Scenario, results: Sequence[Compared]) -> str:
    """Policies compared: bars with spread, and step times of the first seed."""
    rows = "".join(
        f"<tr><td>{escape(e.variant)}</td><td class=n>{e.throughput:.1f} ± {e.spread:.1f}</td>"
        f"<td class=n>{e.throughput / results[0].throughput:.2f}</td><td class=n>{e.step_seconds:.0f}</td>"
        f"<td class=n>{e.results[0].accuracy:.0%}</td><td class=n>{e.results[0].moved:.0%}</td></tr>"
        for e in results
    )
    body = (
        f"<h1>{escape(scenario.name)}</h1><p>{escape(scenario.model)} on {escape(scenario.cluster)}, "
        f"{len(results[0].results)} seed(s), {scenario.steps} steps of {scenario.groups} × {scenario.members} "
        "trajectories. All figures are <b>simulated</b>.</p>"
        + _bars([(e.variant, e.throughput, e.spread) for e in results], "tokens/s/GPU")
        + "<table><tr><th>policy<th class=n>tokens/s/GPU<th class=n>ratio<th class=n>step s<th class=n>right"
        f"<th class=n>moved</tr>{rows}</table><h2>Step times, first seed</h2>"
        + _lines([(e.variant, [s.seconds for s in e.results[0].steps]) for e in results])
    )
    return _page(scenario.name, body)


def replay_page(replayed: Replay) -> str:
    """A recorded run: real step times beside simulated ones."""
    rows = "".join(
        f"<tr><td>{step}</td><td class=n>{real:.2f}</td><td class=n>{simulated:.2f}</td>"
        f"<td class=n>{simulated / real - 1:+.0%}</td></tr>"
        for step, simulated, real in replayed.rows
    )
    name = replayed.recording.config.name
    lines = [("real", [row[2] for row in replayed.rows]), ("simulated", [row[1] for row in replayed.rows])]
    body = (
        f"<h1>{escape(name)} replayed</h1><p>Mean step {replayed.real:.2f} s real, {replayed.simulated:.2f} s "
        f"<b>simulated</b> ({replayed.simulated / replayed.real - 1:+.1%}). Costs: {escape(replayed.provenance)}.</p>"
        + _lines(lines)
        + f"<table><tr><th>step<th class=n>real s<th class=n>simulated s<th class=n>error</tr>{rows}</table>"
    )
    return _page(f"{name} replayed", body)


def shared_page(shared: Sequence[Shared]) -> str:
    """Ways to share a cluster among runs."""
    rows = "".join(
        f"<tr><td>{escape(e.way)}</td><td class=n>{e.progress:.2f} ± {e.spread:.2f}</td>"
        f"<td>{escape(', '.join(f'{name} {value:.1f}' for name, value in e.steps.items()))}</td>"
        f"<td>{escape(', '.join(f'{name} {value}' for name, value in e.last.items()))}</td></tr>"
        for e in shared
    )
    body = (
        "<h1>Several runs on one cluster</h1><p>Progress is the geometric mean of steps over the runs; all figures are "
        "<b>simulated</b>.</p>"
        + _bars([(e.way, e.progress, e.spread) for e in shared], "steps, geometric mean")
        + f"<table><tr><th>way<th class=n>progress<th>steps<th>nodes at the end</tr>{rows}</table>"
    )
    return _page("several runs", body)


def _page(title: str, body: str) -> str:
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>"
    return f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n"


def _bars(rows: Sequence[tuple[str, float, float]], unit: str) -> str:
    if not rows:
        return ""
    most = max(value + spread for _, value, spread in rows)
    height = 26 * len(rows)
    parts = []
    for i, (name, value, spread) in enumerate(rows):
        y, width = 26 * i, 560 * value / most
        low, high = 240 + 560 * (value - spread) / most, 240 + 560 * (value + spread) / most
        parts.append(
            f"<text x=232 y={y + 16} text-anchor=end>{escape(name[:36])}</text>"
            f"<rect x=240 y={y + 4} width={width:.1f} height=16 rx=2 /><line x1={low:.1f} x2={high:.1f} y1={y + 12} "
            f"y2={y + 12} /><text x={max(high, 240 + width) + 6:.1f} y={y + 16}>{value:.1f}</text>"
        )
    label = escape(unit)
    return f"<svg viewBox='0 0 900 {height}' role=img aria-label='{label}'>{''.join(parts)}</svg><small>{label}</small>"


def _lines(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    most = max(max(values) for _, values in rows)
    parts = []
    for i, (name, values) in enumerate(rows):
        colour = _COLOURS[i % len(_COLOURS)]
        points = " ".join(
            f"{40 + 640 * x / max(1, len(values) - 1):.1f},{250 - 230 * y / most:.1f}" for x, y in enumerate(values)
        )
        parts.append(
            f"<polyline points='{points}' style='stroke:{colour}' />"
            f"<text x=700 y={20 + 20 * i} style='fill:{colour}'>{escape(name)}</text>"
        )
    axis = "<line x1=40 x2=680 y1=250 y2=250 /><text x=40 y=268>step 1</text>"
    axis += f"<text x=36 y=24 text-anchor=end>{most:.0f} s</text>"
    return f"<svg viewBox='0 0 900 275' role=img aria-label='step seconds'>{axis}{''.join(parts)}</svg>"
