"""Trajectories of one training step as a zarr v3 group.

Layout, for n trajectories with T tokens and K tool returns in all. Flat arrays of shape (T,): ``tokens`` int32,
``mask`` int8, ``logprobs`` float32, ``versions`` int32; trajectory i has ``offsets[i]:offsets[i + 1]`` of them. One
value a trajectory, shape (n,): the columns of `COLUMNS`; ``end`` and ``stream`` are codes into the root group's
``attributes["libra"]["tables"]``.
``details`` is UTF-8 JSON (task, artifact, tool calls and digests), cut by ``details_offsets``. The group ``tools`` has
shape (K,) each, cut by ``tools/offsets``: ``turn``, ``type`` and ``status`` (codes), ``size``, ``seconds``,
``payload_tokens`` and ``start``, the payload's place in the trajectory's tokens; a payload that was not appended to the
context as it is has start -1 and lies in ``tools/unused_payload``, in order. The group ``segments`` has what serving
each segment took (`libra.resources.types.Served`), cut by ``segments/offsets``: the columns of `SEGMENT_COLUMNS`
(``instance`` and ``finish`` are codes); the migrations of the few that have one are in ``details``.

Invariants: a group is there whole or not at all; reading gives back exactly the trajectories written; writing the same
batch twice is a no-op and writing another over it is an error.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.resources.durable import remove_leftovers, written_whole
from libra.resources.errors import StoreError
from libra.resources.types import Migration, RequestRecord, Served, ToolReturn, ToolState, Trajectory, TrajectoryId
from libra.resources.zarr_files import encode_group, read_array, read_attributes

FORMAT = 2
TOKEN_ARRAYS = {"tokens": np.int32, "mask": np.int8, "logprobs": np.float32, "versions": np.int32}
COLUMNS = {
    "stream": np.int8,
    "group": np.int64,
    "member": np.int64,
    "prompt": np.int64,
    "epoch": np.int32,
    "prompt_tokens": np.int32,
    "turns": np.int32,
    "end": np.int16,
    "reward": np.float64,
    "started": np.float64,
    "ended": np.float64,
    "generate_seconds": np.float64,
    "tool_seconds": np.float64,
}
"""Per-trajectory arrays and their types."""
TOOL_COLUMNS = {
    "turn": np.int32,
    "type": np.int16,
    "size": np.int32,
    "status": np.int16,
    "payload_tokens": np.int32,
    "start": np.int32,
    "seconds": np.float64,
}
"""Per-tool-return arrays and their types, in the group ``tools``."""
SEGMENT_COLUMNS = {
    "tokens": np.int32,
    "context": np.int32,
    "cached": np.int32,
    "instance": np.int16,
    "tp": np.int16,
    "finish": np.int8,
    "started": np.float64,
    "ended": np.float64,
    "queued": np.float64,
    "staged": np.int32,
}
"""Per-segment arrays and their types, in the group ``segments``."""

Array = NDArray[Any]
Tables = dict[str, list[str]]


def write_batch(path: Path, trajectories: Sequence[Trajectory], attributes: Mapping[str, Any]) -> None:
    """Write ``trajectories`` (each with a reward) and ``attributes`` (plain JSON values, finite) as the group ``path``:
    a temporary sibling, fsync, rename. Writing the same content again does nothing.

    `StoreError` if ``path`` holds other content or a trajectory has no reward.
    """
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise StoreError(
                f"trajectory {trajectory.id} has no reward ({trajectory.failure}); "
                "a batch holds usable trajectories only"
            )
    tables: Tables = {
        "stream": ["train", "heldout"], "end": [], "tool_type": [], "tool_status": [], "instance": [], "finish": [],
    }  # fmt: skip
    arrays = _encode(trajectories, tables)
    libra = {
        "format": FORMAT,
        "trajectories": len(trajectories),
        "tables": tables,
        "digest": _digest(arrays),
    }
    files = encode_group(arrays, {**attributes, "libra": libra})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return _check_same(path, files["zarr.json"])
    remove_leftovers(path.parent)
    with written_whole(path) as temporary:
        for name, data in files.items():
            file = temporary / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


class BatchReader:
    """Reads a group of `write_batch`. `StoreError` names the path and what is missing or damaged."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        attributes = read_attributes(self.path)
        libra = attributes.pop("libra", None)
        if libra is None or libra.get("format") != FORMAT:
            found = "no batch" if libra is None else f"a batch of format {libra.get('format')}"
            raise StoreError(f"{self.path} is {found}; this version reads batches of format {FORMAT}")
        self.attributes: dict[str, Any] = attributes
        """What the writer passed along."""
        self._length: int = libra["trajectories"]
        self._tables: Tables = libra["tables"]

    def __len__(self) -> int:
        """Number of trajectories."""
        return self._length

    def array(self, name: str) -> Any:
        """The ``zarr.Array`` called ``name`` (see the module's layout), read only."""
        import zarr

        if not (self.path / name / "zarr.json").exists():
            raise StoreError(f"{self.path} has no array {name!r}; it has {', '.join(self.names())}")
        return zarr.open_array(self.path / name, mode="r")

    def dask(self, name: str) -> Any:
        """The array called ``name`` as a ``dask.array.Array``, one block a chunk."""
        import dask.array

        return dask.array.from_zarr(self.array(name))

    def names(self) -> list[str]:
        """Names of all arrays: ``tokens``, …, ``tools/turn``."""
        folders = {str(file.parent.relative_to(self.path)) for file in self.path.rglob("zarr.json")}
        return sorted(folders - {".", "tools", "segments"})

    def table(self) -> dict[str, Array]:
        """Per-trajectory columns of shape (n,): those of `COLUMNS` (``end`` and ``stream`` as strings), ``id`` as
        strings, ``length`` and ``sampled`` in tokens, ``tools`` the number of tool returns, ``oldest_version`` (-1
        where nothing was sampled)."""
        columns = {name: read_array(self.path, name) for name in COLUMNS}
        offsets = read_array(self.path, "offsets")
        mask, versions = read_array(self.path, "mask"), read_array(self.path, "versions")
        spans = [slice(start, stop) for start, stop in itertools.pairwise(offsets)]
        sampled = [versions[span][mask[span] == 1] for span in spans]
        for name in ("stream", "end"):
            columns[name] = np.array(self._tables[name] or [""], dtype=np.str_)[columns[name]]
        names = zip(columns["stream"], columns["group"], columns["member"], strict=True)
        return columns | {
            "id": np.array([str(TrajectoryId(s, int(g), int(m))) for s, g, m in names], dtype=np.str_),
            "length": np.diff(offsets),
            "sampled": np.array([len(part) for part in sampled], np.int64),
            "oldest_version": np.array([part.min() if len(part) else -1 for part in sampled], np.int64),
            "tools": np.diff(read_array(self.path, "tools/offsets")),
        }

    def trajectories(self, rows: Sequence[int] | None = None) -> list[Trajectory]:
        """The trajectories at ``rows`` (all if None), in that order, exactly as written."""
        rows = range(len(self)) if rows is None else rows
        for row in rows:
            if not 0 <= row < len(self):
                raise StoreError(f"{self.path} has rows 0 to {len(self) - 1}; row {row} was asked for")
        if not len(rows):
            return []
        columns = {name: read_array(self.path, name).tolist() for name in COLUMNS}
        hull = (min(rows), max(rows) + 1)
        tokens = _Cut(self.path, "offsets", {name: name for name in TOKEN_ARRAYS}, *hull)
        details = _Cut(self.path, "details_offsets", {"details": "details"}, *hull)
        tools = _Cut(self.path, "tools/offsets", {name: f"tools/{name}" for name in TOOL_COLUMNS}, *hull)
        served = _Cut(self.path, "segments/offsets", {name: f"segments/{name}" for name in SEGMENT_COLUMNS}, *hull)
        unused = _Cut(self.path, "tools/unused_offsets", {"payload": "tools/unused_payload"}, *hull)
        return [
            self._trajectory(
                {name: column[row] for name, column in columns.items()},
                tokens[row],
                json.loads(details[row]["details"].tobytes(), object_hook=_from_json),
                tools[row],
                unused[row]["payload"],
                served[row],
            )
            for row in rows
        ]

    def records(self, kind: str = "default") -> list[RequestRecord]:
        """What serving each trajectory took, in a run whose environment is ``kind``."""
        return [RequestRecord.of_trajectory(trajectory, kind) for trajectory in self.trajectories()]

    def _trajectory(
        self,
        column: dict[str, Any],
        flat: dict[str, Array],
        details: dict[str, Any],
        tools: dict[str, Array],
        unused: Array,
        served: dict[str, Array],
    ) -> Trajectory:
        values: dict[str, Any] = {**column, **{name: array.copy() for name, array in flat.items()}}
        stream: Any = self._tables["stream"][values.pop("stream")]
        return Trajectory(
            id=TrajectoryId(stream, values.pop("group"), values.pop("member")),
            end=self._tables["end"][values.pop("end")],
            task=details["task"],
            artifact=details["artifact"],
            tools=self._tools(flat["tokens"], details, tools, unused),
            segments=self._segments(details["migrations"], served),
            **values,
        )

    def _segments(self, migrations: list[Any], served: dict[str, Array]) -> tuple[Served, ...]:
        moves = {number: Migration(**fields) for number, fields in migrations}
        rows = [
            dict(zip(served, values, strict=True))
            for values in zip(*(a.tolist() for a in served.values()), strict=True)
        ]
        tables = {name: self._tables[name] for name in ("instance", "finish")}
        return tuple(
            Served(**{**row, **{name: table[row[name]] for name, table in tables.items()}}, migration=moves.get(number))
            for number, row in enumerate(rows)
        )

    def _tools(
        self, tokens: Array, details: dict[str, Any], tools: dict[str, Array], unused: Array
    ) -> tuple[ToolReturn, ...]:
        returns, taken = [], 0
        for values in zip(details["calls"], details["digests"], *(a.tolist() for a in tools.values()), strict=True):
            call, digest, turn, kind, size, status, count, start, seconds = values
            if start < 0:
                payload, taken = unused[taken : taken + count], taken + count
            else:
                payload = tokens[start : start + count]
            state = ToolState(self._tables["tool_type"][kind], size, self._tables["tool_status"][status])
            returns.append(ToolReturn(turn, call, payload.copy(), state, seconds, digest))
        return tuple(returns)


class _Cut:
    """Flat arrays cut by offsets, of rows ``first`` to ``last`` (not included): only their part is read."""

    def __init__(self, path: Path, offsets: str, arrays: dict[str, str], first: int, last: int) -> None:
        self._offsets = read_array(path, offsets).tolist()
        self._start = self._offsets[first]
        self._arrays = {key: read_array(path, name, self._start, self._offsets[last]) for key, name in arrays.items()}

    def __getitem__(self, row: int) -> dict[str, Array]:
        start, stop = self._offsets[row] - self._start, self._offsets[row + 1] - self._start
        return {name: array[start:stop] for name, array in self._arrays.items()}


# -- writing --------------------------------------------------------------------------------------


def _encode(trajectories: Sequence[Trajectory], tables: Tables) -> dict[str, Array]:
    """All arrays of the layout; fills ``tables`` with the words behind the codes, in order of appearance."""
    arrays: dict[str, Array] = {}
    for name, dtype in TOKEN_ARRAYS.items():
        arrays[name] = _flat([getattr(trajectory, name) for trajectory in trajectories], dtype)
    arrays["offsets"] = _offsets([trajectory.length for trajectory in trajectories])
    columns = [_columns(trajectory, tables) for trajectory in trajectories]
    for name, dtype in COLUMNS.items():
        arrays[name] = np.array([column[name] for column in columns], dtype)
    details = [np.frombuffer(_details(trajectory), np.uint8) for trajectory in trajectories]
    arrays["details"], arrays["details_offsets"] = _flat(details, np.uint8), _offsets([len(part) for part in details])
    tools = [_tool_rows(trajectory, tables) for trajectory in trajectories]
    for name, dtype in TOOL_COLUMNS.items():
        arrays[f"tools/{name}"] = np.array([row[name] for rows, _ in tools for row in rows], dtype)
    arrays["tools/offsets"] = _offsets([len(rows) for rows, _ in tools])
    arrays["tools/unused_payload"] = _flat([unused for _, unused in tools], np.int32)
    arrays["tools/unused_offsets"] = _offsets([len(unused) for _, unused in tools])
    served = [_segment_row(each, tables) for trajectory in trajectories for each in trajectory.segments]
    for name, dtype in SEGMENT_COLUMNS.items():
        arrays[f"segments/{name}"] = np.array([row[name] for row in served], dtype)
    arrays["segments/offsets"] = _offsets([len(trajectory.segments) for trajectory in trajectories])
    return arrays


def _columns(trajectory: Trajectory, tables: Tables) -> dict[str, Any]:
    special = {
        "stream": _code(tables["stream"], trajectory.id.stream),
        "group": trajectory.id.group,
        "member": trajectory.id.member,
        "end": _code(tables["end"], trajectory.end),
    }
    return special | {name: getattr(trajectory, name) for name in COLUMNS.keys() - special.keys()}


def _segment_row(served: Served, tables: Tables) -> dict[str, Any]:
    codes = {name: _code(tables[name], getattr(served, name)) for name in ("instance", "finish")}
    return {name: getattr(served, name) for name in SEGMENT_COLUMNS} | codes


def _tool_rows(trajectory: Trajectory, tables: Tables) -> tuple[list[dict[str, Any]], Array]:
    """One row a tool return, and the payloads that do not lie in the context."""
    rows, unused, position = [], [np.empty(0, np.int32)], trajectory.prompt_tokens
    for tool in trajectory.tools:
        start = _locate(trajectory, position, tool.payload)
        if start < 0:
            unused.append(tool.payload)
        else:
            position = start + len(tool.payload)
        row = {"turn": tool.turn, "seconds": tool.seconds, "start": start, "payload_tokens": len(tool.payload)}
        state = {
            "type": _code(tables["tool_type"], tool.state.type),
            "size": tool.state.size,
            "status": _code(tables["tool_status"], tool.state.status),
        }
        rows.append(row | state)
    return rows, np.concatenate(unused)


def _locate(trajectory: Trajectory, position: int, payload: Array) -> int:
    """Where the payload follows the turn that begins at ``position``, or -1 if the context does not hold it there."""
    unsampled = np.flatnonzero(trajectory.mask[position:] == 0)
    start = position + int(unsampled[0]) if len(unsampled) else trajectory.length
    stop = start + len(payload)
    same = np.array_equal(trajectory.tokens[start:stop], payload) and not trajectory.mask[start:stop].any()
    return start if same else -1


def _details(trajectory: Trajectory) -> bytes:
    details = {
        "task": trajectory.task,
        "artifact": trajectory.artifact,
        "calls": [tool.call for tool in trajectory.tools],
        "digests": [tool.digest for tool in trajectory.tools],
        "migrations": [[n, asdict(s.migration)] for n, s in enumerate(trajectory.segments) if s.migration is not None],
    }
    try:
        return json.dumps(details, default=_to_json).encode()
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"trajectory {trajectory.id}: task, artifact and calls must be plain values: {error}"
        ) from error


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is neither a JSON value nor bytes")


def _from_json(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["$bytes"]) if value.keys() == {"$bytes"} else value


def _code(table: list[str], word: str) -> int:
    if word not in table:
        table.append(word)
    return table.index(word)


def _flat(parts: Sequence[Array], dtype: Any) -> Array:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _offsets(lengths: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _digest(arrays: Mapping[str, Array]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.name} {len(array)};".encode())
        digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()


def _check_same(path: Path, root: bytes) -> None:
    """`StoreError` unless the batch at ``path`` has the root metadata ``root`` (attributes and digest of the arrays).
    Compressed bytes may differ between machines, so files are not compared."""
    there, wanted = read_attributes(path), json.loads(root)["attributes"]
    if there != wanted:
        key = next(key for key in [*wanted, *there] if there.get(key) != wanted.get(key))
        values = [attributes.get(key) for attributes in (there, wanted)]
        if key == "libra":
            key, values = "digest", [value and value.get("digest") for value in values]
        raise StoreError(
            f"{path} holds another batch: {key!r} is {values[0]} there and {values[1]} now; a committed batch never "
            "changes, so write this one elsewhere or remove that one"
        )
