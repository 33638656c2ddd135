"""Frames between a Dask worker and its child process: a length, then one packed message.

Invariants: a message that goes in comes out equal (`libra.resources.codec`: plain values, bytes and numpy arrays, no
pickle), whatever pieces the socket cuts the bytes into; a frame larger than `MAX_FRAME` is refused where it is made,
and a length beyond it is taken for a broken stream and never allocated.

Messages are dicts: a request has ``op``, ``args`` and an ``id`` (None: no reply wanted); a reply has ``reply`` (that
id) and ``result`` or ``error`` ([type, text]); an event has ``event`` and ``fields``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from libra.resources.codec import pack, unpack
from libra.resources.errors import LibraError

HEADER = struct.Struct(">I")
MAX_FRAME = 256 * 2**20
"""Bytes of one packed message at most."""

Message = dict[str, Any]


class FrameError(LibraError):
    """A frame is too large, or the stream holds something that is no frame."""


def encode(message: Message) -> bytes:
    """The frame of ``message``. `FrameError` if it is larger than `MAX_FRAME`."""
    body = pack(message)
    if len(body) > MAX_FRAME:
        raise FrameError(
            f"a message of {len(body)} bytes is over the limit of {MAX_FRAME} bytes for child processes; "
            "send a path to the data instead"
        )
    return HEADER.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add ``data`` and yield the messages that are now whole. `FrameError` if the stream is broken."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER.size:
                (length,) = HEADER.unpack_from(self._buffer, start)
                if length > MAX_FRAME:
                    raise FrameError(
                        f"the stream announces a frame of {length} bytes, over the limit of {MAX_FRAME} bytes: "
                        "something else than frames was written to it"
                    )
                stop = start + HEADER.size + length
                if len(self._buffer) < stop:
                    break
                # Advanced before the yield, so that a consumer that stops early does not see the message twice.
                body, start = bytes(self._buffer[start + HEADER.size : stop]), stop
                yield _message(body)
        finally:
            del self._buffer[:start]


def _message(body: bytes) -> Message:
    try:
        message = unpack(body)
    except ValueError as error:
        raise FrameError(f"a frame of {len(body)} bytes cannot be read: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a frame holds {type(message).__name__} where a message (dict) belongs")
    return message
