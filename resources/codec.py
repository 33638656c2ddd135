"""Bytes and plain dicts for what travels between driver, workers and child processes. No pickle anywhere.

Invariants: ``unpack(pack(x))`` equals ``x`` for None, bool, int (64 bits), float, str, bytes, lists, dicts and numeric
numpy arrays (dtype, shape and every bit kept; a tuple comes back as a list, a numpy scalar as a Python number). The
``*_to_wire`` functions give dicts of plain values in which an array is its little-endian bytes, so that they also pass
through Dask's own messages (task metadata), and ``x_from_wire(x_to_wire(x))`` equals ``x``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

import msgpack
import numpy as np
from numpy.typing import DTypeLike, NDArray

from libra.resources.types import (
    Failure,
    Migration,
    Segment,
    Served,
    ToolReturn,
    ToolState,
    Trajectory,
    TrajectoryId,
)

_ARRAY = 1
"""The msgpack extension type of a numpy array: a packed (dtype, shape), then the bytes in C order."""
_NUMERIC = frozenset("biufc")


def pack(value: Any) -> bytes:
    """``value`` as msgpack bytes. ``TypeError`` names the type of what is neither plain nor a numeric array."""
    return cast(bytes, msgpack.packb(value, default=_encode, use_bin_type=True))


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Inverse of `pack`; arrays are writable copies. ``ValueError`` if ``data`` is not one whole packed value."""
    return msgpack.unpackb(data, ext_hook=_decode, raw=False, strict_map_key=False)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _NUMERIC:
            raise TypeError(f"an array of dtype {value.dtype} cannot be packed; use a boolean or numeric dtype")
        little = value.astype(value.dtype.newbyteorder("<"), order="C", copy=False)
        header = msgpack.packb((little.dtype.str, list(little.shape)))
        return msgpack.ExtType(_ARRAY, header + little.tobytes())
    if isinstance(value, np.generic) and value.dtype.kind in _NUMERIC:
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be packed; send plain values, bytes and numeric arrays")


def _decode(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown msgpack extension type {code}; this system writes only {_ARRAY} (numpy array)")
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(data)
    name, shape = unpacker.unpack()
    dtype = np.dtype(name)
    if dtype.kind not in _NUMERIC:
        raise ValueError(f"an array of dtype {dtype} is not accepted; only boolean and numeric dtypes are")
    return np.frombuffer(data, dtype, offset=unpacker.tell()).reshape(shape).copy()


def array_bytes(array: NDArray[Any], dtype: DTypeLike) -> bytes:
    """The bytes of ``array`` as little-endian ``dtype`` in C order."""
    return np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()


def bytes_array(data: bytes, dtype: DTypeLike) -> NDArray[Any]:
    """Inverse of `array_bytes`: shape (n,), native byte order, writable."""
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)


def _plain(value: Any) -> Any:
    """``value`` with every tuple as a list: Dask's messages turn lists into tuples, ours turn tuples into lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def segment_to_wire(segment: Segment) -> dict[str, Any]:
    """A dict of plain values and bytes."""
    return {
        "tokens": array_bytes(segment.tokens, np.int32),
        "logprobs": array_bytes(segment.logprobs, np.float32),
        "versions": array_bytes(segment.versions, np.int32),
        "finish": segment.finish,
        "context": segment.context,
        "cached": segment.cached,
        "instance": segment.instance,
        "started": segment.started,
        "ended": segment.ended,
        "queued": segment.queued,
        "staged": segment.staged,
        "migration": None if segment.migration is None else asdict(segment.migration),
        "tp": segment.tp,
    }


def segment_from_wire(wire: dict[str, Any]) -> Segment:
    """Inverse of `segment_to_wire`."""
    return Segment(
        **{
            **wire,
            "migration": _migration(wire["migration"]),
            "tokens": bytes_array(wire["tokens"], np.int32),
            "logprobs": bytes_array(wire["logprobs"], np.float32),
            "versions": bytes_array(wire["versions"], np.int32),
        }
    )


def _migration(wire: dict[str, Any] | None) -> Migration | None:
    return None if wire is None else Migration(**wire)


def tool_return_to_wire(tool: ToolReturn) -> dict[str, Any]:
    """A dict of plain values and bytes."""
    return {
        "turn": tool.turn,
        "call": tool.call,
        "payload": array_bytes(tool.payload, np.int32),
        "state": [tool.state.type, tool.state.size, tool.state.status],
        "seconds": tool.seconds,
        "digest": tool.digest,
    }


def tool_return_from_wire(wire: dict[str, Any]) -> ToolReturn:
    """Inverse of `tool_return_to_wire`."""
    return ToolReturn(
        turn=wire["turn"],
        call=_plain(wire["call"]),
        payload=bytes_array(wire["payload"], np.int32),
        state=ToolState(*wire["state"]),
        seconds=wire["seconds"],
        digest=wire["digest"],
    )


def trajectory_to_wire(trajectory: Trajectory) -> dict[str, Any]:
    """A dict of plain values and bytes."""
    failure = trajectory.failure
    return {
        "id": str(trajectory.id),
        "prompt": trajectory.prompt,
        "epoch": trajectory.epoch,
        "task": trajectory.task,
        "prompt_tokens": trajectory.prompt_tokens,
        "tokens": array_bytes(trajectory.tokens, np.int32),
        "mask": array_bytes(trajectory.mask, np.int8),
        "logprobs": array_bytes(trajectory.logprobs, np.float32),
        "versions": array_bytes(trajectory.versions, np.int32),
        "tools": [tool_return_to_wire(tool) for tool in trajectory.tools],
        "turns": trajectory.turns,
        "end": trajectory.end,
        "reward": trajectory.reward,
        "failure": None if failure is None else [failure.kind, failure.reason],
        "started": trajectory.started,
        "ended": trajectory.ended,
        "generate_seconds": trajectory.generate_seconds,
        "tool_seconds": trajectory.tool_seconds,
        "artifact": trajectory.artifact,
        "segments": [asdict(served) for served in trajectory.segments],
    }


def trajectory_from_wire(wire: dict[str, Any]) -> Trajectory:
    """Inverse of `trajectory_to_wire`."""
    return Trajectory(
        **{
            **wire,
            "id": TrajectoryId.parse(wire["id"]),
            "task": _plain(wire["task"]),
            "tokens": bytes_array(wire["tokens"], np.int32),
            "mask": bytes_array(wire["mask"], np.int8),
            "logprobs": bytes_array(wire["logprobs"], np.float32),
            "versions": bytes_array(wire["versions"], np.int32),
            "tools": tuple(tool_return_from_wire(tool) for tool in wire["tools"]),
            "failure": None if wire["failure"] is None else Failure(*wire["failure"]),
            "artifact": _plain(wire["artifact"]),
            "segments": tuple(Served(**{**s, "migration": _migration(s["migration"])}) for s in wire["segments"]),
        }
    )
