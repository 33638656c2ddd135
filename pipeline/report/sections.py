"""The report's sections that hold charts and tables: what is drawn, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from libra.pipeline.report.charts import Axis, Marker, Series, bars, histogram, line_chart, nothing, shares
from libra.pipeline.report.data import ReportData
from libra.pipeline.view.idle import BUSY
from libra.pipeline.view.monitor import length_measures
from libra.pipeline.view.text import visible

STEP = Axis("step", whole=True)
IDLE_LEAD = (
    "Time of each resource, start-up included: busy while at least one request, call or optimizer step runs on it, "
    "else waiting for what is named."
)
LEARNING_LEAD = (
    "Measured on the batch of each step, before its update. |Δlogp| compares the logprobs that the engine recorded "
    "with the trainer’s, over tokens that were sampled by the very version that is trained."
)
TRANSCRIPT_LEAD = "Two trajectories of the first batch read and four of the last, chosen by reward and length."
_BINS = 36
_MEASURES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("entropy (nats)", (("entropy", "entropy"),)),
    ("|Δlogp|", (("logprob_gap_mean", "mean"), ("logprob_gap_max", "max"))),
    ("gradient norm", (("grad_norm", "gradient norm"),)),
    ("share of tokens clipped", (("clip_share", "clip share"),)),
    ("loss", (("loss", "loss"),)),
)
_FIXED_COLORS = {BUSY: 3, "other": 6}
_CAUSE_COLORS = (2, 1, 4, 7, 5, 8)


def reward(data: ReportData) -> str:
    """Mean reward of each batch, its exponential mean, and the held-out evaluations."""
    rewarded = (point for point in data.metrics.evaluations if point["reward"] is not None)
    heldout = [(float(point["version"]), float(point["reward"])) for point in rewarded]
    series = [
        Series("batch", _measure(data, "reward"), 1, "dots", faint=True),
        Series("batch, exponential mean", _measure(data, "reward_ema"), 1),
        Series("held-out", heldout, 2, "dots"),
    ]
    values = [value for one in series for _, value in one.points]
    unit = bool(values) and min(values) >= 0 and max(values) <= 1
    axis = Axis("mean reward", low=0.0 if unit else None, high=1.0 if unit else None)
    return line_chart(series, STEP, axis, height=300)


def reward_lead(data: ReportData) -> str:
    """The held-out evaluations in words."""
    evaluations = data.metrics.evaluations
    if not evaluations:
        return "No held-out evaluation."
    points = [
        f"all {point['failures']} tasks failed at step {point['version']}"
        if point["reward"] is None
        else f"{point['reward']:.3f} at step {point['version']}"
        for point in evaluations
    ]
    tasks = max(point["tasks"] for point in evaluations)
    over = f", the mean over {tasks} tasks sampled once each" if tasks else ""
    return f"Held-out reward{over}: {', '.join(points)}."


def lengths(data: ReportData) -> str:
    """Histogram of final contexts in bins of equal ratio, and quantiles by step."""
    sizes = data.trajectories.length
    if not len(sizes):
        return nothing()
    low, high = float(sizes.min()), float(sizes.max())
    edges = np.geomspace(max(low, 1.0) * 0.999, max(high * 1.001, low + 1.0), _BINS + 1)
    counts, _ = np.histogram(sizes, edges)
    p50, p90, p99 = np.percentile(sizes, (50, 90, 99))
    markers = [Marker(float(p50), f"p50 {p50:,.0f}"), Marker(float(p90), f"p90 {p90:,.0f}")]
    markers += [Marker(float(p99), f"p99 {p99:,.0f}"), Marker(high, f"max {high:,.0f}")]
    axis = Axis("final context (tokens)", log=True, text=lambda value: f"{value:,.0f}")
    picture = histogram(edges.tolist(), counts.tolist(), axis, Axis("trajectories"), markers, tail_from=float(p90))
    names = (("length_max", "max", 2), ("length_p99", "p99", 4), ("length_p50", "p50", 1))
    by_step = [Series(label, _measure(data, name), color) for name, label, color in names]
    drift = line_chart(by_step, STEP, Axis("tokens", low=0.0), height=210)
    return f"{picture}<h3>by step</h3>{drift}"


def length_lead(data: ReportData) -> str:
    """The tail in words."""
    sizes = data.trajectories.length
    share = length_measures(sizes.tolist())["length_tail_share"]
    if share is None:
        return "No batch has been committed."
    read, there = data.trajectories.batches
    of = f" ({read} of {there} batches)" if read < there else ""
    return f"{len(sizes):,} trained trajectories{of}; the longest 10 % hold {100 * share:.0f} % of all tokens."


def idle(data: ReportData) -> str:
    """A bar a resource: busy, and what it waited for."""
    rows: Mapping[str, Mapping[str, float]] = data.summary.get("idle") or {}
    rows = {resource: parts for resource in ("rollout", "tool", "reward", "train") if (parts := rows.get(resource))}
    total: dict[str, float] = {}
    for parts in rows.values():
        for cause, share in parts.items():
            total[cause] = total.get(cause, 0.0) + share
    waits = sorted((cause for cause in total if cause not in _FIXED_COLORS), key=lambda cause: -total[cause])
    colors = {BUSY: _FIXED_COLORS[BUSY]}
    colors |= {cause: _CAUSE_COLORS[min(index, len(_CAUSE_COLORS) - 1)] for index, cause in enumerate(waits)}
    return shares(rows, colors | {"other": _FIXED_COLORS["other"]})


def learning(data: ReportData) -> str:
    """Small charts of what the trainer measured."""
    charts = []
    for title, lines in _MEASURES:
        series = [Series(label, _measure(data, name), color) for color, (name, label) in enumerate(lines, 1)]
        if any(one.points for one in series):
            charts.append((title, _small(series, Axis("", text=_short))))
    return _pair(charts) if charts else nothing()


def staleness_and_speed(data: ReportData) -> str:
    """Staleness of trained sequences, and pace by step."""
    stale = data.trajectories.staleness
    counts = {str(value): float(np.sum(stale == value)) for value in range(int(stale.max()) + 1)} if len(stale) else {}
    seconds = [Series("seconds a step", _measure(data, "seconds")[1:], 4)]
    speed = [Series("sampled tokens/s", _measure(data, "tokens_per_second")[1:], 3)]
    charts = [
        ("staleness of trained trajectories (versions)", bars(counts, "versions", Axis("trajectories"))),
        ("seconds between steps", _small(seconds, Axis("", low=0.0, text=_short))),
        ("sampled tokens a second", _small(speed, Axis("", low=0.0, text=_short))),
    ]
    return _pair(charts)


def endings(data: ReportData) -> str:
    """Tables of ends, failures, groups, moves and outages."""
    total = sum(data.trajectories.ends.values())
    ends = {name: f"{count:,} ({100 * count / total:.0f} %)" for name, count in data.trajectories.ends.most_common()}
    failures = {name: f"{count:,}" for name, count in (data.summary.get("failures") or {}).items()}
    keys = {"skipped_groups": "without spread (skipped)", "dropped_groups": "dropped (too few rewards, or expired)"}
    groups = {label: f"{data.summary.get(key, 0):,}" for key, label in keys.items()}
    tables = [
        ("trained trajectories ended by", _table(ends)),
        ("failures", _table(failures) if failures else '<p class="none">none</p>'),
        ("groups", _table(groups)),
    ]
    if served := requests(data):
        tables.append(("what serving the trained trajectories took", _table(served)))
    if policy := data.summary.get("policy"):
        tables.append(("the bucket policy", _table({name: f"{value:,.6g}" for name, value in policy.items()})))
    if moves := data.summary.get("moves"):
        tables.append(("moves to another instance, by the way of the KV", _table(_moves(moves))))
    return _pair(tables) + _outages(data)


def _outages(data: ReportData) -> str:
    """Every worker that lost its role, why, and when it was back."""
    outages = data.summary.get("outages") or []
    if not outages:
        return ""
    rows = [
        "<tr>"
        f"<td>{_html(outage['worker'])}</td><td>{_html(outage['role'])}</td>"
        f'<td class="n">{outage["at"]:,.0f} s</td><td class="n">{_back(outage["seconds"])}</td>'
        f"<td>{_html(outage['reason'] or 'no reason given')}</td>"
        "</tr>"
        for outage in outages
    ]
    count = int(data.summary["restarts"])
    title = "workers that lost their role" + (f" (the first {len(rows)} of {count:,})" if count > len(rows) else "")
    head = "<tr><th>worker</th><th>role</th><th>at</th><th>back after</th><th>why</th></tr>"
    return f"<h3>{_html(title)}</h3><table>{head}{''.join(rows)}</table>"


def _back(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:,.1f} s"


def requests(data: ReportData) -> dict[str, str]:
    """Sums over the run's steps in words: seconds in queues, engines (by TP) and tools; KV computed, read and moved."""
    steps = [record["requests"] for record in data.metrics.steps if record.get("requests")]
    if not steps:
        return {}
    summed = {name: sum(step[name] for step in steps) for name in steps[0] if name != "residence"}
    degrees = sorted({int(tp) for step in steps for tp in step["residence"]})
    residence = {tp: sum(step["residence"].get(str(tp), 0.0) for step in steps) for tp in degrees}
    rows = {
        "queued in engines": f"{summed['queue_seconds']:,.1f} s",
        **{f"in engines of TP {tp}": f"{seconds:,.1f} s" for tp, seconds in residence.items()},
        "in tools": f"{summed['tool_seconds']:,.1f} s",
        "KV computed": f"{summed['prefilled']:,} tokens",
        "Σ context · tokens": f"{summed['kvint']:,} tokens²",
    }
    if summed["migrations"]:
        rows["KV moved"] = (
            f"{summed['migrations']:,} times, {summed['migration_bytes'] / 1e6:,.1f} MB in "
            f"{summed['migration_seconds']:.2f} s"
        )
    return rows


def _moves(moves: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """``load`` → ``12 of 3,400 tokens, 4.1 MB in 0.2 s``."""
    rows = {}
    for way, sums in sorted(moves.items()):
        rows[way] = f"{sums['count']:,.0f} of {sums['tokens']:,.0f} tokens"
        if sums["bytes"]:
            rows[way] += f", {sums['bytes'] / 1e6:,.1f} MB in {sums['seconds']:.2f} s"
    return rows


def _measure(data: ReportData, name: str) -> list[tuple[float, float]]:
    """(step, value) of one measure, steps without it left out."""
    values = ((float(record["step"]), record.get(name)) for record in data.metrics.steps)
    return [(step, float(value)) for step, value in values if isinstance(value, (int, float))]


def _small(series: list[Series], y: Axis) -> str:
    return line_chart(series, STEP, y, width=340, height=180)


def _pair(parts: list[tuple[str, str]]) -> str:
    inner = "".join(f"<div><h3>{_html(title)}</h3>{body}</div>" for title, body in parts)
    return f'<div class="pair">{inner}</div>'


def _table(rows: Mapping[str, str]) -> str:
    if not rows:
        return nothing()
    cells = "".join(f'<tr><td>{_html(name)}</td><td class="n">{_html(value)}</td></tr>' for name, value in rows.items())
    return f"<table>{cells}</table>"


def _html(value: Any) -> str:
    return escape(visible(str(value)))


def _short(value: float) -> str:
    """Whole numbers as they are, others with three digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
