"""What a trajectory did, for replays: a trace with its hand-overs, and that as a row of plain values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from libra.resources.types import ToolState, Trajectory
from libra.scheduler_plugin.simulation.traces import Trace, Turn, trace_of


def played(trajectory: Trajectory, kind: str = "default") -> Trace:
    """What a trajectory of the environment ``kind`` did. The time that neither an engine nor a tool worked on it is
    spread evenly over its hand-overs: before its first segment, around each tool call, and after its last segment."""
    trace = trace_of(trajectory, kind)
    calls = sum(turn.state is not None for turn in trace.turns)
    lifetime = trajectory.ended - trajectory.started
    over = max(0.0, lifetime - trajectory.generate_seconds - trajectory.tool_seconds) / (calls + 2)
    turns = [turn if turn.state is None else replace(turn, seconds=turn.seconds + over) for turn in trace.turns]
    return replace(trace, turns=tuple(turns), lead=over, trail=over)


def trace_row(trace: Trace) -> list[Any]:
    """A trace as a metrics file holds it: ``[name, prompt tokens, domain, lead, trail, turns]``, a turn being
    ``[generated, payload, seconds, [type, size, status] or None]``."""
    turns = [
        [t.generated, t.payload, t.seconds, None if t.state is None else [t.state.type, t.state.size, t.state.status]]
        for t in trace.turns
    ]
    return [trace.name, trace.prompt_tokens, trace.domain, trace.lead, trace.trail, turns]


def trace_of_row(row: Sequence[Any], kind: str = "default") -> Trace:
    """Inverse of `trace_row`; a task that names no domain is of that called ``kind``.
    Raises `ValueError` or `TypeError` for anything else."""
    name, prompt, domain, lead, trail, turns = row
    chain = tuple(
        Turn(generated, None if state is None else ToolState(*state), payload, seconds)
        for generated, payload, seconds, state in turns
    )
    return Trace(name, prompt, chain, kind if domain == "default" else domain, lead, trail)
