"""The report's page: every section as HTML, in reading order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml

from libra.pipeline.report import sections
from libra.pipeline.report.data import ReportData, collect
from libra.pipeline.report.style import style_sheet
from libra.pipeline.view.lines import duration, mean_reward
from libra.pipeline.view.text import visible
from libra.resources.durable import write_file

_OUTCOMES = ("finished", "failed", "interrupted", "unfinished")
"""What a summary may say; also classes of the page's style."""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` of a run folder, whole or not at all, and return its path. `StoreError` if ``run_dir`` is
    no run folder."""
    data = collect(run_dir)
    write_file(data.folder.report, page(data).encode())
    return data.folder.report


def page(data: ReportData) -> str:
    """The whole HTML document."""
    name = text(data.summary.get("name") or data.config.get("name") or data.folder.path.name)
    body = "".join(_body(data, name))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{name} – run report</title><style>{style_sheet()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def text(value: object) -> str:
    """Anything as HTML text, control characters made visible."""
    return escape(visible(str(value)))


def _body(data: ReportData, name: str) -> Iterator[str]:
    outcome = str(data.summary.get("outcome", "unfinished"))
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(data.folder.created))
    style = outcome if outcome in _OUTCOMES else "unfinished"
    yield (
        f'<header><h1>{name}</h1><span class="badge {style}">{text(outcome)}</span>'
        f'<span class="soft">{made} · run {text(data.folder.run)} · {text(data.folder.path)}</span></header>'
    )
    if error := data.summary.get("error"):
        yield _section("Why it ended", f"<pre>{text(error)}</pre>", "problems")
    yield _tiles(data.summary, data)
    yield _section("Reward", sections.reward(data), lead=sections.reward_lead(data))
    yield _section("Trajectory length", sections.lengths(data), lead=sections.length_lead(data))
    yield _section("Where the time went", sections.idle(data), lead=sections.IDLE_LEAD)
    yield _section("Learning", sections.learning(data), lead=sections.LEARNING_LEAD)
    yield _section("Staleness and speed", sections.staleness_and_speed(data))
    yield _section("How trajectories ended", sections.endings(data))
    yield _section("Trajectories, turn by turn", _transcripts(data), lead=sections.TRANSCRIPT_LEAD)
    yield _section("Config", f"<details><summary>every key</summary><pre>{_config(data.config)}</pre></details>")
    if data.problems:
        items = "".join(f"<li>{text(problem)}</li>" for problem in data.problems)
        yield _section("What this report lacks", f"<ul>{items}</ul>", "problems")
    yield "<footer>Built from the run folder’s files by <code>libra report</code>.</footer>"


def _section(title: str, body: str, style: str = "", lead: str = "") -> str:
    intro = f'<p class="lead">{text(lead)}</p>' if lead else ""
    return f'<section class="{style}"><h2>{text(title)}</h2>{intro}{body}</section>'


def _tiles(summary: Mapping[str, Any], data: ReportData) -> str:
    def whole(key: str) -> str:
        return f"{summary[key]:,}" if summary.get(key) is not None else "–"

    before, after = summary.get("heldout_before"), summary.get("heldout_after")
    failures = summary.get("failures") or {}
    seconds = summary.get("wall_seconds")
    steps = f"{whole('steps')} / {data.config.get('steps', '–')}"
    tiles = [
        (f"{mean_reward(before)} → {mean_reward(after)}", "held-out reward"),
        (duration(seconds) if seconds is not None else "–", "wall time"),
        (steps, "steps"),
        (whole("trajectories"), "trajectories"),
        (whole("tokens"), f"tokens, {whole('sampled_tokens')} sampled"),
        (whole("staleness_max"), "largest staleness"),
        (whole("skipped_groups"), "groups without spread"),
        (f"{sum(failures.values()):,}", "failures"),
    ]
    return '<div class="tiles">' + "".join(_tile(value, label) for value, label in tiles) + "</div>"


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{text(value)}</b><span>{text(label)}</span></div>'


def _transcripts(data: ReportData) -> str:
    if not data.transcripts:
        return '<p class="none">no batch has been committed</p>'
    parts = []
    for index, one in enumerate(data.transcripts):
        reward = "–" if one.reward is None else text(one.reward)
        blocks = "".join(
            f'<div class="turn {block.kind}"><small><b>{block.kind}</b> · {block.tokens} tokens'
            f"{''.join(f' · {text(fact)}' for fact in block.facts)}</small><pre>{text(block.text)}</pre></div>"
            for block in one.blocks
        )
        head = (
            f"<b>step {one.version + 1}, {text(one.why)}</b> · reward {reward} · ended by {text(one.end)} · "
            f"{one.length:,} tokens · {text(one.id)}"
        )
        task = f'<details class="task"><summary>task</summary><pre>{text(one.task)}</pre></details>'
        is_open = " open" if index == 2 or len(data.transcripts) <= 2 else ""
        parts.append(f"<details{is_open}><summary>{head}</summary>{task}{blocks}</details>")
    return "".join(parts)


def _config(config: Mapping[str, Any]) -> str:
    return text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
