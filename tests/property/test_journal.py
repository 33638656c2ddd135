"""Whatever happens to a journal's bytes, what is read back is a prefix of what was appended, or an error."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from libra.pipeline.store.journal import Journal, read_journal
from libra.pipeline.store.segments import header, record, segment_path
from libra.resources.codec import pack
from libra.resources.errors import StoreError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8) | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SEGMENTS = st.lists(st.lists(VALUES, max_size=5), min_size=1, max_size=3)
"""The records of each segment."""


@contextmanager
def written(segments: list[list[Any]]) -> Iterator[Path]:
    """A journal folder with the bytes that a `Journal` writes, without its fsyncs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, values in enumerate(segments):
            data = header(number)
            for value in values:
                data += record(pack(value), len(data))
            segment_path(folder, number).write_bytes(data)
        yield folder


@settings(max_examples=30, deadline=None)
@given(SEGMENTS, hnp.arrays(np.float32, st.integers(0, 5)))
def test_what_is_appended_is_read_back(segments: list[list[Any]], array: np.ndarray) -> None:
    with tempfile.TemporaryDirectory() as name, written(segments) as same:
        with Journal(Path(name), sync_seconds=3600) as journal:
            for number, values in enumerate(segments):
                if number:
                    assert journal.rotate() == number
                for value in values:
                    journal.append(value)
        for number in range(len(segments)):
            assert segment_path(same, number).read_bytes() == segment_path(Path(name), number).read_bytes()
        with Journal(Path(name), sync_seconds=3600) as journal:
            journal.append(array)
        contents = read_journal(Path(name))
        assert contents.records[:-1] == [value for values in segments for value in values]
        np.testing.assert_array_equal(contents.records[-1], array)


@settings(max_examples=100, deadline=None)
@given(SEGMENTS, st.data())
def test_a_cut_at_any_byte_of_the_last_segment_leaves_a_prefix(segments: list[list[Any]], data: st.DataObject) -> None:
    values = [value for part in segments for value in part]
    with written(segments) as folder:
        last = segment_path(folder, len(segments) - 1)
        whole = last.read_bytes()
        last.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])

        kept = read_journal(folder).records
        assert kept == values[: len(kept)]
        assert len(kept) >= len(values) - len(segments[-1])
        with Journal(folder, sync_seconds=3600) as journal:
            journal.append("next")
        contents = read_journal(folder)
        assert contents.records == [*kept, "next"]
        assert contents.tail is None


@settings(max_examples=200, deadline=None)
@given(SEGMENTS, st.data())
def test_a_flipped_bit_is_never_read_as_data(segments: list[list[Any]], data: st.DataObject) -> None:
    values = [value for part in segments for value in part]
    with written(segments) as folder:
        number = data.draw(st.integers(0, len(segments) - 1))
        path = segment_path(folder, number)
        damaged = bytearray(path.read_bytes())
        bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            contents = read_journal(folder)
        except StoreError as error:
            assert path.name in str(error)
        else:
            assert number == len(segments) - 1, "damage before another segment is never passed over"
            assert contents.tail is not None
            before = len(values) - len(segments[-1])
            assert len(contents.records) in (before, len(values) - 1), "only the last record may be taken for a tail"
            assert contents.records == values[: len(contents.records)]


@settings(max_examples=50, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=4), st.binary(min_size=1, max_size=40))
def test_garbage_at_the_end_is_cut_off(values: list[Any], garbage: bytes) -> None:
    with written([values]) as folder:
        path = segment_path(folder, 0)
        path.write_bytes(path.read_bytes() + garbage)
        contents = read_journal(folder)
        assert contents.records == values
        assert contents.tail is not None and f"{len(garbage)} bytes" in contents.tail
