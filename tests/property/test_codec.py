"""What travels between processes comes back as it was: packed values, segments, tool returns and trajectories."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from libra.resources import codec
from libra.resources.types import Failure, Migration, Segment, ToolReturn, ToolState, Trajectory, TrajectoryId

NUMERIC = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64, 128)),
)
ARRAYS = NUMERIC.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(), st.binary()
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)
SECONDS = st.floats(0, 1e10)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return (
            a.dtype.newbyteorder("=") == b.dtype and a.shape == b.shape and a.astype(b.dtype).tobytes() == b.tobytes()
        )
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(PLAIN)
def test_plain_values_round_trip(value: Any) -> None:
    assert same(codec.unpack(codec.pack(value)), value)


@given(ARRAYS)
def test_arrays_keep_dtype_shape_and_bits(array: np.ndarray) -> None:
    back = codec.unpack(codec.pack({"a": [array]}))["a"][0]
    assert same(array, back)
    assert back.flags.writeable and back.flags.aligned


def test_noncontiguous_arrays_and_numpy_scalars() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    assert codec.unpack(codec.pack(array)).tolist() == array.tolist()
    assert codec.unpack(codec.pack([np.float32(0.5), np.int64(3), (1, 2)])) == [0.5, 3, [1, 2]]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array(["text"]), np.array([None], dtype=object)])
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be packed"):
        codec.pack(value)


def test_foreign_extensions_and_object_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="extension type 7"):
        codec.unpack(msgpack.packb(msgpack.ExtType(7, b"x")))
    with pytest.raises(ValueError, match="not accepted"):
        codec.unpack(msgpack.packb(msgpack.ExtType(1, msgpack.packb(("|O", [1])) + b"\0" * 8)))


@st.composite
def token_arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:
    n = draw(st.integers(0, 8))
    return {
        "tokens": draw(hnp.arrays(np.int32, n)),
        "logprobs": draw(hnp.arrays(np.float32, n)),
        "versions": draw(hnp.arrays(np.int32, n)),
    }


MIGRATIONS = st.builds(
    Migration,
    way=st.sampled_from(["load", "fetch", "prefill"]),
    source=st.text(),
    target=st.text(),
    tokens=st.integers(0, 10**6),
    bytes=st.integers(0, 2**40),
    seconds=SECONDS,
    fetching=st.none() | SECONDS,
    prefilling=st.none() | SECONDS,
)
SEGMENTS = st.builds(
    lambda arrays, **rest: Segment(**arrays, **rest),
    token_arrays(),
    finish=st.sampled_from(["stop", "length", "abort"]),
    context=st.integers(0, 10**6),
    cached=st.integers(0, 10**6),
    instance=st.text(),
    started=SECONDS,
    ended=SECONDS,
    queued=SECONDS,
    staged=st.integers(0, 10**6),
    migration=st.none() | MIGRATIONS,
    tp=st.sampled_from([1, 2, 4, 8]),
)
CALLS = st.dictionaries(st.text(), PLAIN, max_size=3)
TOOLS = st.builds(
    ToolReturn,
    turn=st.integers(0, 99),
    call=CALLS,
    payload=hnp.arrays(np.int32, st.integers(0, 8)),
    state=st.builds(ToolState, type=st.text(), size=st.integers(0, 3), status=st.text()),
    seconds=SECONDS,
    digest=st.text(),
)
TRAJECTORIES = st.builds(
    lambda arrays, **rest: Trajectory(**arrays, mask=np.ones(len(arrays["tokens"]), np.int8), **rest),
    token_arrays(),
    id=st.builds(TrajectoryId, st.sampled_from(["train", "heldout"]), st.integers(0, 9), st.integers(0, 9)),
    prompt=st.integers(0, 99),
    epoch=st.integers(0, 9),
    task=CALLS,
    prompt_tokens=st.integers(0, 8),
    tools=st.lists(TOOLS, max_size=2).map(tuple),
    turns=st.integers(0, 9),
    end=st.text(),
    reward=st.one_of(st.none(), st.floats(allow_nan=False)),
    failure=st.one_of(st.none(), st.builds(Failure, st.sampled_from(["infra", "task"]), st.text())),
    started=SECONDS,
    artifact=CALLS,
)


@given(SEGMENTS)
def test_segments_round_trip(segment: Segment) -> None:
    assert same(codec.segment_from_wire(codec.unpack(codec.pack(codec.segment_to_wire(segment)))), segment)


@given(TOOLS)
def test_tool_returns_round_trip(tool: ToolReturn) -> None:
    assert same(codec.tool_return_from_wire(codec.unpack(codec.pack(codec.tool_return_to_wire(tool)))), tool)


@settings(max_examples=50)
@given(TRAJECTORIES)
def test_trajectories_round_trip_even_where_lists_became_tuples(trajectory: Trajectory) -> None:
    wire = codec.trajectory_to_wire(trajectory)
    through_dask = msgpack.unpackb(msgpack.packb(wire, use_bin_type=True), use_list=False, strict_map_key=False)
    assert same(codec.trajectory_from_wire(through_dask), trajectory)
    assert same(codec.trajectory_from_wire(codec.unpack(codec.pack(wire))), trajectory)
