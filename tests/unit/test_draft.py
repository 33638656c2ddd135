"""A draft whose turns are cut short: what comes next, and what counts as one turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from libra.pipeline.ledger.draft import Draft
from libra.resources.types import Finish, Segment, ToolReturn, ToolState, TrajectoryId

CUT: dict[str, Any] = {"kind": "cut", "call": {}, "end": ""}
CALL: dict[str, Any] = {"kind": "call", "call": {"name": "get"}, "end": ""}
FINAL: dict[str, Any] = {"kind": "final", "call": {}, "end": "answer"}


def make() -> Draft:
    prompt = np.arange(5, dtype=np.int32)
    return Draft(TrajectoryId.parse("g0m0"), 0, 0, {}, prompt, oldest=0, max_turns=9, started=0.0)


def grow(draft: Draft, count: int, finish: Finish, action: dict[str, Any], payload: int = 0) -> None:
    tool = None
    if payload:
        tool = ToolReturn(0, {}, np.zeros(payload, np.int32), ToolState("get", 0, "ok"), 0.0, "")
    ids = np.zeros(count, np.int32)
    segment = Segment(ids, ids.astype(np.float32), ids, finish, draft.length + payload, 0, "a", 0.0, 1.0)
    draft.grow(tool, segment, action)


def test_a_turn_that_was_cut_short_goes_on_with_the_tokens_that_it_has() -> None:
    draft = make()
    assert (draft.next, draft.cut) == ("rollout", 0)
    grow(draft, 3, "abort", CUT)
    assert (draft.next, draft.cut, draft.end) == ("rollout", 3, "open")
    grow(draft, 0, "abort", CUT)
    grow(draft, 4, "abort", CUT)
    assert (draft.next, draft.cut) == ("rollout", 7)
    grow(draft, 2, "stop", CALL)
    assert (draft.next, draft.cut) == ("tool", 0)


def test_what_was_cut_short_before_a_return_is_of_another_turn() -> None:
    draft = make()
    grow(draft, 3, "abort", CUT)
    grow(draft, 2, "stop", CALL)
    grow(draft, 6, "abort", CUT, payload=4)
    assert draft.cut == 6
    grow(draft, 1, "abort", CUT)
    assert draft.cut == 7
    grow(draft, 1, "stop", FINAL)
    finished = draft.finish(1.0, None, {}, 2.0)
    assert (finished.turns, finished.sampled, finished.end) == (2, 3 + 2 + 6 + 1 + 1, "answer")
