"""A run told in lines: one a step, one for each thing worth telling.

Invariants: pure; every line is one line and safe to print (`text.visible`), whatever tools and models wrote.
"""

from __future__ import annotations

from typing import Any

from libra.pipeline.view import events as happened
from libra.pipeline.view.idle import BUSY, Seconds, shares
from libra.pipeline.view.monitor import RunMonitor
from libra.pipeline.view.text import one_line

_SHOWN_RESOURCES = ("rollout", "tool", "train")


def step_line(record: dict[str, Any], monitor: RunMonitor) -> str:
    """One line for one step record."""
    parts = [
        f"step {record['step']}/{monitor.steps}",
        f"reward {number(record['reward'])} (mean {number(record['reward_ema'])})",
        f"length p50 {count(record['length_p50'])} p99 {count(record['length_p99'])} max {count(record['length_max'])}",
        f"{count(record['tokens_per_second'])} tok/s",
        f"staleness ≤ {count(record['staleness_max'])}",
        f"idle {idle_text(record['idle'])}",
        f"{record['seconds']:.1f} s",
    ]
    if failures := failures_text(monitor):
        parts.append(f"failures {failures}")
    if record["replayed"]:
        parts.append("replayed")
    return "  ".join(parts)


def event_line(event: happened.Event, monitor: RunMonitor) -> str | None:
    """The line for an event that is worth one, else None. Of many failures of a kind the first three are told, then
    each tenfold."""
    match event:
        case happened.RunStarted():
            begin = f"{event.name}: {event.steps} steps in {event.run_dir}"
            begin += f", resumed at step {event.version}" if event.version else ""
            return one_line(f"{begin}; dashboard {event.dashboard}" if event.dashboard else begin, 400)
        case happened.RoleChanged(state="failed" | "lost"):
            reason = event.error or "no reason given"
            return one_line(f"worker {event.worker}: {event.role} {event.state}: {reason}", 400)
        case happened.EvalFinished():
            if event.reward is None:
                return f"no held-out reward at step {event.version}: all {event.failures} tasks failed"
            failed = f", {event.failures} failed" if event.failures else ""
            return (
                f"held-out reward {number(event.reward)} at step {event.version} "
                f"({event.tasks} tasks{failed}, {event.seconds:.1f} s)"
            )
        case happened.TrajectoryEnded(failure=str() as kind):
            return _failure(f"{kind} failure, trajectory {event.id} dropped", event.reason, monitor.failures[kind])
        case happened.Failed():
            name = f"{event.kind} retried" if event.retried else event.kind
            again = ", tried again" if event.retried else ""
            return _failure(f"{event.kind} failure{again}: {event.what}", event.reason, monitor.failures[name])
        case happened.GroupFinished(outcome="expired"):
            return f"group {event.group} was due and not complete at its deadline: dropped"
        case happened.Note():
            return one_line(event.text, 400)
        case happened.RunEnded():
            return end_line(monitor)
    return None


def progress_line(progress: happened.Progress) -> str:
    """``cold start: step 40, loss 1.2``."""
    fields = ", ".join(f"{name} {number(value)}" for name, value in progress.fields.items())
    return one_line(f"{progress.what}: {fields}")


def end_line(monitor: RunMonitor) -> str:
    """How the run ended, in one line."""
    summary = monitor.summary()
    before, after = summary["heldout_before"], summary["heldout_after"]
    parts = [
        f"{monitor.name} {monitor.outcome} at step {monitor.version} of {monitor.steps}"
        f" after {duration(monitor.wall_seconds)}",
        f"{monitor.trajectories:,} trajectories, {monitor.tokens:,} tokens",
    ]
    if before is not None and after is not None:
        parts.insert(1, f"held-out reward {before:.3f} → {after:.3f}")
    return one_line("; ".join(parts), 400)


def idle_text(seconds: Seconds) -> str:
    """``rollout 12 % (admission), train 40 % (due group)``: the idle share of each resource and its largest cause."""
    parts = []
    measured = shares(seconds)
    for resource in _SHOWN_RESOURCES:
        causes = dict(measured.get(resource, {}))
        if not causes:
            continue
        idle = 1.0 - causes.pop(BUSY, 0.0)
        cause = f" ({next(iter(causes))})" if causes and idle >= 0.01 else ""
        parts.append(f"{resource} {percent(idle)}{cause}")
    return ", ".join(parts) or "-"


def failures_text(monitor: RunMonitor) -> str:
    """``infra 2, task 1``; empty if nothing failed."""
    return ", ".join(f"{kind} {number_of}" for kind, number_of in sorted(monitor.failures.items()) if number_of)


def number(value: Any) -> str:
    """Three significant digits for a float; ``-`` for nothing."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def mean_reward(value: float | None) -> str:
    """``0.844``; ``–`` where no trajectory had a reward."""
    return "–" if value is None else f"{value:.3f}"


def percent(share: float) -> str:
    """``12 %``."""
    return f"{100 * share:.0f} %"


def count(value: float | None) -> str:
    """A whole number with thousands separators; ``-`` for nothing."""
    return "-" if value is None else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """``42 s``, ``3:05 min`` or ``2:03:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def _failure(what: str, reason: str, number_of: int) -> str | None:
    told = number_of <= 3 or number_of in (10**power for power in range(1, 10))
    ordinal = f" (number {number_of:,} of its kind)" if number_of > 1 else ""
    return one_line(f"{what}{ordinal}: {reason}", 400) if told else None
