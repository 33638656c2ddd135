"""A batch reads back exactly as it was written, whatever its trajectories look like."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.resources.batches import BatchReader, write_batch
from libra.resources.types import ToolReturn, ToolState, Trajectory, TrajectoryId

WORDS = st.text(max_size=6)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.dictionaries(
    WORDS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | FINITE | WORDS | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
        max_leaves=4,
    ),
    max_size=3,
)
TOKENS = st.lists(st.integers(0, 3), max_size=5).map(lambda ids: np.array(ids, np.int32))
"""Few different ids, so that payloads are easily mistaken for their neighbours."""


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """A context of prompt, turns (perhaps empty) and payloads (perhaps empty, perhaps not appended)."""
    prompt = draw(TOKENS)
    parts, masks, tools = [prompt], [np.zeros(len(prompt), np.int8)], []
    for turn in range(draw(st.integers(0, 4))):
        sampled = draw(TOKENS)
        parts.append(sampled)
        masks.append(np.ones(len(sampled), np.int8))
        payload = draw(TOKENS)
        state = ToolState(draw(WORDS), draw(st.integers(0, 3)), draw(st.sampled_from(["ok", "busy"])))
        tools.append(ToolReturn(turn, draw(PLAIN), payload, state, draw(FINITE), draw(WORDS)))
        if draw(st.booleans()):
            parts.append(payload)
            masks.append(np.zeros(len(payload), np.int8))
    tokens, mask = np.concatenate(parts), np.concatenate(masks)
    floats = np.array(
        draw(st.lists(st.floats(-9, 0, width=32), min_size=len(tokens), max_size=len(tokens))), np.float32
    )
    identity = TrajectoryId(
        draw(st.sampled_from(["train", "heldout"])), draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))
    )
    return Trajectory(
        id=identity,
        prompt=draw(st.integers(0, 2**60)),
        epoch=draw(st.integers(0, 100)),
        task=draw(PLAIN),
        prompt_tokens=len(prompt),
        tokens=tokens,
        mask=mask,
        logprobs=np.where(mask, floats, 0).astype(np.float32),
        versions=np.where(mask, 5, -1).astype(np.int32),
        tools=tuple(tools),
        turns=len(tools),
        end=draw(WORDS),
        reward=draw(FINITE),
        started=draw(FINITE),
        ended=draw(FINITE),
        generate_seconds=draw(FINITE),
        tool_seconds=draw(FINITE),
        artifact=draw(PLAIN),
    )


def plain(value: Any) -> Any:
    """A dataclass as comparable plain values, arrays with their type."""
    if isinstance(value, np.ndarray):
        return [value.dtype.name, value.tolist()]
    if isinstance(value, (Trajectory, ToolReturn)):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(trajectories(), max_size=4), st.data())
def test_round_trip(batch: list[Trajectory], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "step-000000.zarr"
        write_batch(path, batch, {"version": 0})
        reader = BatchReader(path)
        assert [plain(trajectory) for trajectory in reader.trajectories()] == [plain(each) for each in batch]
        rows = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=4)) if batch else []
        assert [plain(trajectory) for trajectory in reader.trajectories(rows)] == [plain(batch[row]) for row in rows]
        table = reader.table()
        assert table["length"].tolist() == [trajectory.length for trajectory in batch]
        assert table["end"].tolist() == [trajectory.end.rstrip("\0") for trajectory in batch], "as numpy strings"
        assert table["oldest_version"].tolist() == [5 if trajectory.sampled else -1 for trajectory in batch]
        write_batch(path, batch, {"version": 0})
