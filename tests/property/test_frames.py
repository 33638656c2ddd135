"""Frames survive however the socket cuts them, and refuse what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.tasks.child import frames
from libra.tasks.child.frames import HEADER, MAX_FRAME, Decoder, FrameError, encode

MESSAGES = st.dictionaries(
    st.text(max_size=5),
    st.one_of(st.none(), st.integers(-(2**63), 2**63), st.text(), st.binary(), st.lists(st.booleans(), max_size=3)),
    max_size=4,
)


@given(st.lists(MESSAGES, max_size=5), st.data())
def test_any_cut_of_the_stream_gives_the_messages_back(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    stream = b"".join(map(encode, messages))
    decoder, received = Decoder(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert received == messages


def test_arrays_travel_in_frames() -> None:
    (message,) = Decoder().feed(encode({"tokens": np.arange(5, dtype=np.int32)}))
    assert message["tokens"].dtype == np.int32
    assert message["tokens"].tolist() == [0, 1, 2, 3, 4]


def test_a_consumer_that_stops_early_sees_each_message_once() -> None:
    decoder = Decoder()
    stream = encode({"n": 1}) + encode({"n": 2})
    for message in decoder.feed(stream):
        assert message == {"n": 1}
        break
    assert list(decoder.feed(b"")) == [{"n": 2}]


def test_too_large_a_message_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    with pytest.raises(FrameError, match=r"1\d\d bytes is over the limit of 100 bytes"):
        encode({"blob": bytes(101)})


def test_a_length_that_no_frame_has_is_a_broken_stream() -> None:
    with pytest.raises(FrameError, match="something else than frames"):
        list(Decoder().feed(HEADER.pack(MAX_FRAME + 1)))


@pytest.mark.parametrize("body", [b"\xc1", b"\x01"])
def test_a_frame_that_holds_no_message_is_an_error(body: bytes) -> None:
    with pytest.raises(FrameError):
        list(Decoder().feed(HEADER.pack(len(body)) + body))
