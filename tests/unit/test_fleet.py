"""What the driver knows of the workers, and what it says that idle engines wait for."""

from __future__ import annotations

from typing import Any

import pytest

from libra.pipeline.run.fleet import Fleet
from libra.pipeline.run.loop import idle_engines


def role(worker: str, state: str, version: int | None = None) -> dict[str, Any]:
    return {
        "event": "role", "worker": worker, "role": "rollout", "state": state, "version": version, "given_up": False,
        "error": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("events", "playing", "cause", "detail"),
    [
        ([role("a", "starting")], 8, "start", "an instance with weights (a: starting)"),
        ([role("a", "ready", None)], 8, "start", "an instance with weights (a: ready)"),
        ([role("a", "ready", 3), role("a", "failed")], 8, "start", "an instance with weights (a: failed)"),
        ([role("a", "ready", 3)], 8, "tool", "tool returns and hand-over of 8 trajectories"),
        ([role("a", "ready", 3)], 0, "admission", "room for a group (version 3 installed, 4 trained)"),
    ],
)
def test_engines_wait_for_their_start_before_they_wait_for_anybody_else(
    events: list[dict[str, Any]], playing: int, cause: str, detail: str
) -> None:
    fleet = Fleet(emit=lambda event: None, give_up=lambda key, error: None)
    for event in events:
        fleet.on_event(event)
    wait = idle_engines(fleet, playing, trained=4)
    assert (wait.who, wait.cause, wait.detail) == ("rollout", cause, detail)
