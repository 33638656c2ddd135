"""The books as plain values and back, for checkpoints.

Invariant: a restored ledger answers every question as the original does, and applying the same events to both keeps it
so; finished-but-untrained work and work in flight are part of the snapshot.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from libra.pipeline.ledger.draft import Draft
from libra.pipeline.ledger.events import Evaluated, from_record, to_record
from libra.pipeline.ledger.ledger import Batch, Group, Ledger, Rules
from libra.resources.codec import (
    array_bytes,
    bytes_array,
    segment_from_wire,
    segment_to_wire,
    tool_return_from_wire,
    tool_return_to_wire,
    trajectory_from_wire,
    trajectory_to_wire,
)
from libra.resources.types import TrajectoryId

_CALL = {"kind": "call", "call": {}, "end": ""}
"""What every step but the last one meant."""


def snapshot(ledger: Ledger) -> dict[str, Any]:
    """The books as plain values."""
    return {
        "version": ledger.version,
        "installed": ledger.installed,
        "admitted": ledger.admitted,
        "returned": ledger.returned,
        "returned_in_a_row": ledger.returned_in_a_row,
        "ready": list(ledger.ready),
        "closed": [[version, path] for version, path in ledger.closed.items()],
        "counts": dict(ledger.counts),
        "evaluations": [to_record(e) for e in ledger.evaluations],
        "groups": [_group_to_wire(group) for group in ledger.groups.values()],
        "batches": [[b.version, [trajectory_to_wire(t) for t in b.trajectories]] for b in ledger.batches.values()],
    }


def restore(rules: Rules, state: dict[str, Any]) -> Ledger:
    """The ledger that `snapshot` described, under ``rules``."""
    ledger = Ledger(rules)
    ledger.version = state["version"]
    ledger.installed = state["installed"]
    ledger.admitted = state["admitted"]
    ledger.returned = state["returned"]
    ledger.returned_in_a_row = state["returned_in_a_row"]
    ledger.ready = list(state["ready"])
    ledger.closed = dict(state["closed"])
    ledger.counts = Counter(state["counts"])
    ledger.evaluations = [e for r in state["evaluations"] if isinstance(e := from_record(r), Evaluated)]
    ledger.groups = {g.ordinal: g for g in (_group_from_wire(w, rules) for w in state["groups"])}
    ledger.batches = {v: Batch(v, tuple(trajectory_from_wire(t) for t in ts)) for v, ts in state["batches"]}
    return ledger


def _group_to_wire(group: Group) -> dict[str, Any]:
    return {
        "ordinal": group.ordinal,
        "epoch": group.epoch,
        "prompt": group.prompt,
        "drafts": [_draft_to_wire(draft) for draft in group.drafts.values()],
        "ended": [trajectory_to_wire(t) for t in group.ended.values()],
    }


def _group_from_wire(state: dict[str, Any], rules: Rules) -> Group:
    drafts = [_draft_from_wire(d, state, rules) for d in state["drafts"]]
    group = Group(state["ordinal"], state["epoch"], state["prompt"], {d.id.member: d for d in drafts})
    for ended in state["ended"]:
        group.end(trajectory_from_wire(ended))
    return group


def _draft_to_wire(draft: Draft) -> dict[str, Any]:
    return {
        "id": str(draft.id),
        "task": draft.task,
        "tokens": array_bytes(draft.prompt_tokens, np.int32),
        "oldest": draft.oldest,
        "started": draft.started,
        "steps": [[None if tool is None else tool_return_to_wire(tool), segment_to_wire(s)] for tool, s in draft.steps],
        "action": draft.action,
    }


def _draft_from_wire(state: dict[str, Any], group: dict[str, Any], rules: Rules) -> Draft:
    draft = Draft(
        id=TrajectoryId.parse(state["id"]),
        prompt=group["prompt"],
        epoch=group["epoch"],
        task=state["task"],
        prompt_tokens=bytes_array(state["tokens"], np.int32),
        oldest=state["oldest"],
        max_turns=rules.max_turns,
        started=state["started"],
    )
    for tool, segment in state["steps"]:
        draft.grow(None if tool is None else tool_return_from_wire(tool), segment_from_wire(segment), _CALL)
    draft.action = state["action"]
    return draft
