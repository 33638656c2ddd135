from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from libra.resources.batches import COLUMNS, TOKEN_ARRAYS, BatchReader, write_batch
from libra.resources.errors import StoreError
from libra.resources.types import (
    Failure,
    Migration,
    RequestRecord,
    Served,
    ToolReturn,
    ToolState,
    Trajectory,
    TrajectoryId,
)
from libra.resources.zarr_files import encode_group, read_array


def lookup(turn: int, payload: list[int], status: str = "ok") -> ToolReturn:
    call = {"key": f"k{turn}"}
    return ToolReturn(turn, call, np.array(payload, np.int32), ToolState("lookup", 1, status), 0.25, "d" * 8)


def trajectory(member: int, reward: float | None = 0.1) -> Trajectory:
    """Prompt 1 2, turn 5 6, return 9 9 9, turn 7, return 4 4 that the token limit kept out of the context."""
    mask = np.array([0, 0, 1, 1, 0, 0, 0, 1], np.int8)
    return Trajectory(
        id=TrajectoryId("train", 4, member),
        prompt=11,
        epoch=2,
        task={"start": "a", "store": {"a": [1, "b", None]}},
        prompt_tokens=2,
        tokens=np.array([1, 2, 5, 6, 9, 9, 9, 7], np.int32),
        mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, 3 + member, -1).astype(np.int32),
        tools=(lookup(0, [9, 9, 9]), lookup(1, [4, 4], "busy")),
        turns=2,
        end="tokens",
        reward=reward,
        started=1.5,
        ended=2.5,
        generate_seconds=0.125,
        tool_seconds=0.5,
        artifact={"patch": b"\x00\xff"},
        segments=(
            Served(2, 2, 0, "a", 1, "stop", 1.5, 1.75, 0.125, 7, None),
            Served(1, 7, 4, "b", 2, "length", 2.0, 2.25, 0.0, 0, Migration("load", "a", "b", 4, 64, 0.1, 0.2, None)),
        ),
    )


def assert_same(left: Any, right: Any) -> None:
    """Equal in every field, arrays by type and value."""
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), field.name
        elif field.name == "tools":
            assert len(a) == len(b)
            for pair in zip(a, b, strict=True):
                assert_same(*pair)
        else:
            assert a == b and type(a) is type(b), field.name


def test_a_batch_reads_back_exactly_in_any_order(tmp_path: Path) -> None:
    written = [trajectory(member, 0.1 * member) for member in range(3)]
    write_batch(tmp_path / "step-000003.zarr", written, {"version": 3})
    reader = BatchReader(tmp_path / "step-000003.zarr")

    assert len(reader) == 3
    assert reader.attributes == {"version": 3}
    for left, right in zip(reader.trajectories(), written, strict=True):
        assert_same(left, right)
    for left, row in zip(reader.trajectories([2, 1]), (2, 1), strict=True):
        assert_same(left, written[row])


def test_records_say_what_serving_each_trajectory_took(tmp_path: Path) -> None:
    inside = replace(trajectory(0), tools=(lookup(0, [9, 9, 9]),))
    write_batch(tmp_path / "b.zarr", [inside, replace(inside, id=TrajectoryId("train", 4, 1), segments=())], {})
    [record, bare] = BatchReader(tmp_path / "b.zarr").records("hop")
    assert record == RequestRecord.of_trajectory(inside, "hop")
    assert (record.context, record.queue_seconds, record.residence) == (8, 0.125, {1: 0.125, 2: 0.25})
    assert (record.prefilled, record.domain, len(record.migrations)) == (2 + 3, "hop", 1)
    assert bare.residence == {}
    assert RequestRecord.of_trajectory(replace(inside, task={"domain": "math"}), "hop").domain == "math"


def test_it_opens_as_plain_zarr_and_as_dask(tmp_path: Path) -> None:
    path = tmp_path / "step-000000.zarr"
    write_batch(path, [trajectory(0), trajectory(1)], {})
    reader = BatchReader(path)

    group = zarr.open_group(path, mode="r")
    assert group["tokens"][:].tolist() == [1, 2, 5, 6, 9, 9, 9, 7] * 2
    for name in reader.names():
        np.testing.assert_array_equal(group[name][:], read_array(path, name), err_msg=name)
        np.testing.assert_array_equal(reader.dask(name).compute(), reader.array(name)[:], err_msg=name)
    assert {*TOKEN_ARRAYS, *COLUMNS, "offsets", "tools/start"} <= set(reader.names())
    assert float(reader.dask("reward").mean().compute()) == 0.1


def test_payloads_are_found_in_the_context(tmp_path: Path) -> None:
    write_batch(tmp_path / "b.zarr", [trajectory(0)], {})
    assert read_array(tmp_path / "b.zarr", "tools/start").tolist() == [4, -1]
    assert read_array(tmp_path / "b.zarr", "tools/unused_payload").tolist() == [4, 4]


def test_the_table_has_one_value_a_trajectory(tmp_path: Path) -> None:
    never = replace(trajectory(1), mask=np.zeros(8, np.int8), versions=np.full(8, -1, np.int32), end="malformed")
    write_batch(tmp_path / "b.zarr", [trajectory(0), never], {})
    table = BatchReader(tmp_path / "b.zarr").table()

    assert table["id"].tolist() == ["g4m0", "g4m1"]
    assert table["end"].tolist() == ["tokens", "malformed"]
    assert table["length"].tolist() == [8, 8]
    assert table["sampled"].tolist() == [3, 0]
    assert table["oldest_version"].tolist() == [3, -1]
    assert table["tools"].tolist() == [2, 2]
    assert table["reward"].tolist() == [0.1, 0.1]


def test_writing_again_is_a_no_op_and_another_batch_an_error(tmp_path: Path) -> None:
    path = tmp_path / "b.zarr"
    write_batch(path, [trajectory(0)], {"version": 3})
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}

    write_batch(path, [trajectory(0)], {"version": 3})
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    with pytest.raises(StoreError, match=r"another batch: 'digest' is .* committed batch never changes"):
        write_batch(path, [trajectory(0, 0.2)], {"version": 3})
    with pytest.raises(StoreError, match="'version' is 3 there and 4 now"):
        write_batch(path, [trajectory(0)], {"version": 4})


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=60)
    (tmp_path / f"b.zarr.tmp-{ended.pid}-00" / "tokens").mkdir(parents=True)
    write_batch(tmp_path / "b.zarr", [trajectory(0)], {})
    assert [path.name for path in tmp_path.iterdir()] == ["b.zarr"]


def test_a_trajectory_without_reward_is_refused(tmp_path: Path) -> None:
    failed = replace(trajectory(5, None), failure=Failure("infra", "the engine died"))
    with pytest.raises(StoreError, match=r"g4m5 has no reward .*the engine died"):
        write_batch(tmp_path / "b.zarr", [failed], {})
    with pytest.raises(StoreError, match="g4m0: task, artifact and calls must be plain values: set"):
        write_batch(tmp_path / "b.zarr", [replace(trajectory(0), task={"x": {1}})], {})
    assert not (tmp_path / "b.zarr").exists()


def test_missing_and_damaged_batches_are_named(tmp_path: Path) -> None:
    path = tmp_path / "b.zarr"
    with pytest.raises(StoreError, match=r"b\.zarr/zarr\.json is missing"):
        BatchReader(path)
    write_batch(path, [trajectory(0)], {})
    reader = BatchReader(path)
    with pytest.raises(StoreError, match="has rows 0 to 0; row 1 was asked for"):
        reader.trajectories([1])
    with pytest.raises(StoreError, match=r"has no array 'token'; it has .*tokens"):
        reader.array("token")

    chunk = path / "tokens" / "c.0"
    good = chunk.read_bytes()
    chunk.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(StoreError, match=r"tokens/c\.0 is damaged: CRC-32C [0-9a-f]{8}, written as [0-9a-f]{8}"):
        reader.trajectories()
    with pytest.raises(ValueError, match="checksum"):
        reader.array("tokens")[:]
    chunk.unlink()
    with pytest.raises(StoreError, match=r"tokens/c\.0 is missing"):
        reader.trajectories()
    zarr.create_group(tmp_path / "other.zarr")
    with pytest.raises(StoreError, match=r"other\.zarr is no batch"):
        BatchReader(tmp_path / "other.zarr")


def test_large_arrays_lie_in_several_compressed_chunks(tmp_path: Path) -> None:
    array = np.zeros((1 << 24) + 1000, np.int8)
    array[[0, 1 << 24, -1]] = 1, 2, 3
    for name, data in encode_group({"mask": array}, {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)

    assert (tmp_path / "mask" / "c.0").stat().st_size < len(array) // 50
    assert read_array(tmp_path, "mask", (1 << 24) - 1, (1 << 24) + 1).tolist() == [0, 2]
    np.testing.assert_array_equal(read_array(tmp_path, "mask"), array)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "mask", mode="r")[:], array)


def test_reading_needs_neither_torch_nor_zarr(tmp_path: Path) -> None:
    write_batch(tmp_path / "b.zarr", [trajectory(0)], {})
    code = (
        "import sys; from libra.resources.batches import BatchReader;"
        f"BatchReader({str(tmp_path / 'b.zarr')!r}).trajectories();"
        "sys.exit(','.join({'torch', 'zarr', 'dask', 'distributed'} & sys.modules.keys()) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
