from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.pipeline.store.journal import Journal, read_journal
from libra.resources.errors import StoreError


def append(folder: Path, records: list[Any]) -> None:
    with Journal(folder) as journal:
        for record in records:
            journal.append(record)


def test_records_read_back_in_order_across_reopens(tmp_path: Path) -> None:
    append(tmp_path, [{"kind": "segment", "tokens": np.arange(3, dtype=np.int32)}, None])
    append(tmp_path, ["closed", 3.5])

    contents = read_journal(tmp_path)
    assert contents.tail is None
    np.testing.assert_array_equal(contents.records[0]["tokens"], np.arange(3, dtype=np.int32))
    assert contents.records[1:] == [None, "closed", 3.5]


def test_an_empty_or_missing_journal_has_no_records(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none").records == []
    append(tmp_path / "new", [])
    assert read_journal(tmp_path / "new").records == []


def test_a_record_survives_the_process_before_any_fsync(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sync_seconds=3600)
    journal.append("a")
    assert read_journal(tmp_path).records == ["a"]
    journal.close()


def test_a_half_written_tail_is_reported_and_cut_off(tmp_path: Path) -> None:
    append(tmp_path, ["one", "two", "three"])
    path = tmp_path / "000000.log"
    os.truncate(path, path.stat().st_size - 2)

    contents = read_journal(tmp_path)
    assert contents.records == ["one", "two"]
    assert contents.tail is not None and "unfinished record after 2 intact ones" in contents.tail
    with Journal(tmp_path) as journal:
        assert journal.dropped is not None and "000000.log" in journal.dropped
        journal.append("four")
    assert read_journal(tmp_path).records == ["one", "two", "four"]
    assert read_journal(tmp_path).tail is None


def test_damage_before_intact_records_is_an_error_with_its_place(tmp_path: Path) -> None:
    append(tmp_path, ["one", "two", "three"])
    path = tmp_path / "000000.log"
    data = bytearray(path.read_bytes())
    data[data.index(b"two")] ^= 4
    path.write_bytes(data)

    with pytest.raises(StoreError, match=r"damaged at byte 32, after 1 intact records.*truncate -s 32"):
        read_journal(tmp_path)
    with pytest.raises(StoreError, match="damaged at byte 32"):
        Journal(tmp_path)


def test_a_copy_of_a_record_inside_a_payload_is_not_a_record(tmp_path: Path) -> None:
    append(tmp_path / "inner", ["x" * 20])
    inner = (tmp_path / "inner" / "000000.log").read_bytes()
    append(tmp_path / "outer", ["first", inner + b"the end"])
    path = tmp_path / "outer" / "000000.log"
    os.truncate(path, path.stat().st_size - 1)

    contents = read_journal(tmp_path / "outer")
    assert contents.records == ["first"]
    assert contents.tail is not None


def test_rotation_divides_what_came_before_from_what_comes_after(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append("old")
        first = journal.rotate()
        journal.append("new")
        second = journal.rotate()
        assert (first, second) == (1, 2)
        assert read_journal(tmp_path).records == ["old", "new"]
        assert read_journal(tmp_path, first).records == ["new"]
        assert read_journal(tmp_path, second).records == []
        assert journal.prune(before=first) == [0]
        assert journal.prune(before=99) == [1], "never the segment being written"
    with pytest.raises(StoreError, match="segments 2 to 2, but segment 1 is needed"):
        read_journal(tmp_path, 1)


def test_a_missing_or_cut_segment_between_others_is_an_error(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for record in "abc":
            journal.append(record)
            journal.rotate()
    middle = tmp_path / "000001.log"
    os.truncate(middle, middle.stat().st_size - 1)
    with pytest.raises(StoreError, match=r"000001\.log.*unfinished.*000002\.log follows"):
        read_journal(tmp_path)
    middle.unlink()
    with pytest.raises(StoreError, match=r"000001\.log is missing"):
        Journal(tmp_path)


def test_a_segment_whose_header_a_crash_cut_is_begun_again(tmp_path: Path) -> None:
    append(tmp_path, ["a"])
    (tmp_path / "000001.log").write_bytes(b"LIB")
    assert read_journal(tmp_path).records == ["a"]
    append(tmp_path, ["b"])
    assert read_journal(tmp_path).records == ["a", "b"]
    assert read_journal(tmp_path, 1).records == ["b"]


def test_durable_waits_for_the_disk_and_hastens_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Journal(tmp_path, sync_seconds=3600) as journal:
            first = journal.append("a")
            await journal.durable(first)
            assert journal.durable_position >= first
            last = [journal.append(number) for number in range(100)][-1]
            await asyncio.gather(*(journal.durable(position) for position in (2, 50, last)), journal.durable())
            assert journal.durable_position == journal.position == last
            with pytest.raises(StoreError, match="has 101 records; nobody can wait for number 102"):
                await journal.durable(last + 1)

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def test_a_cancelled_wait_disturbs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    real = os.fdatasync

    def slow(descriptor: int) -> None:
        release.wait(60)
        real(descriptor)

    async def scenario(journal: Journal) -> None:
        journal.append("a")
        cancelled, waiting = (asyncio.ensure_future(journal.durable()) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        release.set()
        await waiting
        assert cancelled.cancelled()

    monkeypatch.setattr(os, "fdatasync", slow)
    with Journal(tmp_path) as journal:
        asyncio.run(asyncio.wait_for(scenario(journal), timeout=60))


def test_append_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: release.wait(60))
    with Journal(tmp_path, sync_seconds=0) as journal:
        positions = [journal.append(number) for number in range(50)]
        journal.rotate()
        positions.append(journal.append(50))
        assert positions == list(range(1, 52))
        assert journal.durable_position == 0
        release.set()
    assert journal.durable_position == 51


def test_a_failed_fsync_ends_the_journal_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    async def scenario(journal: Journal) -> None:
        journal.append("a")
        with pytest.raises(StoreError, match="Input/output error; check the disk"):
            await journal.durable()
        with pytest.raises(StoreError, match="Input/output error"):
            journal.append("b")

    journal = Journal(tmp_path, sync_seconds=3600)
    journal.flush()
    monkeypatch.setattr(os, "fdatasync", broken)
    asyncio.run(asyncio.wait_for(scenario(journal), timeout=60))
    with pytest.raises(StoreError, match="Input/output error"):
        journal.close()


def test_a_failed_write_leaves_the_journal_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if b"lost" in data:
            real(descriptor, data[:10], offset)
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with Journal(tmp_path) as journal:
        journal.append("a")
        with pytest.raises(StoreError, match=r"000000\.log: No space left on device; make room"):
            journal.append("lost")
        journal.append("b")
    assert read_journal(tmp_path).records == ["a", "b"]


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("a")
    journal.close()
    journal.close()
    assert journal.durable_position == 1
    with pytest.raises(StoreError, match="is closed"):
        journal.append("b")


def test_threads_may_append_at_once(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        threads = [
            threading.Thread(target=lambda n=n: [journal.append([n, i]) for i in range(200)])  # type: ignore[misc]
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        journal.rotate()
        for thread in threads:
            thread.join(timeout=60)
    records = read_journal(tmp_path).records
    for n in range(4):
        assert [i for m, i in records if m == n] == list(range(200))
