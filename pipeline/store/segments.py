"""The files of a journal: how records lie in a segment, and how much of a segment can be trusted.

A segment ``000007.log`` is a header (magic, number, CRC-32C) and records: marker, length of the payload, CRC-32C,
payload (integers little-endian, 32 bits). A record's checksum starts from its offset in the segment, so that bytes
which only look like a record (a copy inside a payload) are not taken for one.

Invariant: `read_segment` returns a prefix of what was written. Bytes after it without one intact record are a tail that
a crash cut short; with one, the segment is damaged and nothing is returned.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from libra.native.checksum import crc32c
from libra.resources.errors import StoreError

_MAGIC = b"LIBRAJ01"
_HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<III")
_MARKER = 0x6A7EC0DE
_MARKER_BYTES = _MARKER.to_bytes(4, "little")
HEADER_BYTES = _HEADER.size
MAX_PAYLOAD = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """``payloads`` in order; ``end``: offset after the last of them (0 if not even the header is whole); ``tail``: what
    was found there instead of a record, None if the file ends there."""

    payloads: list[bytes]
    end: int
    tail: str | None


def segment_path(folder: Path, number: int) -> Path:
    """The file of segment ``number`` (from 0)."""
    return folder / f"{number:06d}.log"


def segment_numbers(folder: Path) -> list[int]:
    """The numbers of the segments in ``folder``, ascending. `StoreError` names one that is missing between others."""
    numbers = sorted(int(path.stem) for path in folder.glob("*.log") if re.fullmatch(r"\d{6,}", path.stem))
    if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
        missing = next(number for number in range(numbers[0], numbers[-1]) if number not in numbers)
        raise StoreError(
            f"{segment_path(folder, missing)} is missing, but later segments are there: restore it, or remove the "
            "later ones to go on without their records"
        )
    return numbers


def header(number: int) -> bytes:
    """The first bytes of segment ``number``."""
    return _HEADER.pack(_MAGIC, number, crc32c(_MAGIC, number))


def record(payload: bytes, offset: int) -> bytes:
    """The bytes of a record that begins at ``offset``; the payload has at most `MAX_PAYLOAD` bytes."""
    return _RECORD.pack(_MARKER, len(payload), crc32c(payload, offset & 0xFFFFFFFF)) + payload


def read_segment(folder: Path, number: int) -> SegmentContents:
    """The intact records of a segment. `StoreError` if intact records follow damaged bytes."""
    path = segment_path(folder, number)
    data = path.read_bytes()
    payloads: list[bytes] = []
    offset = HEADER_BYTES
    if not data.startswith(header(number)):
        _check_nothing_follows(path, data, 0, 0)
        return SegmentContents([], 0, f"{path}: the header is not whole ({len(data)} bytes)")
    while (payload := _payload_at(data, offset)) is not None:
        payloads.append(payload)
        offset += _RECORD.size + len(payload)
    if offset == len(data):
        return SegmentContents(payloads, offset, None)
    _check_nothing_follows(path, data, offset, len(payloads))
    tail = f"{path}: {len(data) - offset} bytes of an unfinished record after {len(payloads)} intact ones"
    return SegmentContents(payloads, offset, tail)


def _payload_at(data: bytes, offset: int) -> bytes | None:
    """The payload of the record at ``offset``; None if there is no intact one."""
    start = offset + _RECORD.size
    if start > len(data):
        return None
    marker, length, checksum = _RECORD.unpack_from(data, offset)
    if marker != _MARKER or start + length > len(data):
        return None
    payload = data[start : start + length]
    return payload if crc32c(payload, offset & 0xFFFFFFFF) == checksum else None


def _check_nothing_follows(path: Path, data: bytes, offset: int, intact: int) -> None:
    later = offset
    while (later := data.find(_MARKER_BYTES, later + 1)) >= 0:
        if _payload_at(data, later) is not None:
            raise StoreError(
                f"{path} is damaged at byte {offset}, after {intact} intact records, and intact records follow at byte "
                f"{later}: the disk has lost data. Restore the file; or, to go on without all that follows, run "
                f"`truncate -s {offset} {path}` and remove later segments"
            )
