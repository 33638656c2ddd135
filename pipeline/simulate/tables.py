"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from libra.pipeline.simulate.jobs import Shared
from libra.pipeline.simulate.paper import Paper
from libra.pipeline.simulate.paper.page import simulated_text
from libra.pipeline.simulate.replay import Replay
from libra.pipeline.simulate.scenario import Scenario
from libra.pipeline.simulate.variants import Compared


def comparison_table(scenario: Scenario, results: Sequence[Compared]) -> Table:
    """Throughput of every policy over the seeds, relative to the first one."""
    title = f"{scenario.name}: {scenario.model} on {scenario.cluster}, {len(results[0].results)} seed(s), simulated"
    table = Table(title=title, box=None)
    for column in ("policy", "tokens/s/GPU", "±", "ratio", "step s", "right", "moved", "changes"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    base = results[0].throughput
    for each in results:
        first = each.results
        table.add_row(
            each.variant, f"{each.throughput:.1f}", f"{each.spread:.1f}", f"{each.throughput / base:.2f}",
            f"{each.step_seconds:.0f}", f"{sum(r.accuracy for r in first) / len(first):.0%}",
            f"{sum(r.moved for r in first) / len(first):.0%}", f"{sum(r.changes for r in first) / len(first):.1f}",
        )  # fmt: skip
    return table


def paper_table(paper: Paper) -> Table:
    """Published beside simulated, with the status of each figure."""
    counts = ", ".join(f"{paper.count(status)} {status}" for status in ("derived", "tuned", "not reproduced"))
    table = Table(title=f"published figures beside simulated ones: {counts}", box=None)
    for column in ("figure", "published", "simulated", "status", "remark"):
        table.add_column(column, justify="right" if column in ("published", "simulated") else "left")
    for f in paper.figures:
        published = f"{f.published.value:,g} {f.published.unit}"
        table.add_row(escape(f.name), published, simulated_text(f), f.status, escape(f.remark))
    return table


def shared_table(shared: Sequence[Shared]) -> Table:
    """Ways to share a cluster."""
    table = Table(title="several runs on one cluster, simulated", box=None)
    for column in ("way", "progress", "±", "ratio", "steps of each run", "nodes at the end"):
        table.add_column(column, justify="right" if column in ("progress", "±", "ratio") else "left")
    for each in shared:
        steps = ", ".join(f"{name} {value:.1f}" for name, value in each.steps.items())
        nodes = ", ".join(f"{name} {value}" for name, value in each.last.items())
        ratio = each.progress / shared[0].progress
        table.add_row(each.way, f"{each.progress:.2f}", f"{each.spread:.2f}", f"{ratio:.2f}", steps, nodes)
    return table


def replay_table(replayed: Replay) -> Table:
    """A recorded run: real step times beside simulated ones."""
    title = f"run {escape(replayed.recording.config.name)} replayed; costs: {escape(replayed.provenance)}"
    table = Table(title=title, box=None, caption=replayed.caveat or None)
    for column in ("step", "real s", "simulated s", "error"):
        table.add_column(column, justify="right")
    for step, simulated, real in replayed.rows:
        table.add_row(str(step), f"{real:.2f}", f"{simulated:.2f}", f"{simulated / real - 1:+.0%}")
    error = replayed.simulated / replayed.real - 1
    table.add_row("mean", f"{replayed.real:.2f}", f"{replayed.simulated:.2f}", f"{error:+.1%}", style="bold")
    return table
