"""The bytes of an arena file: superblock, slots, owner table, extents.

    [superblock 4 KiB][slots × 512 B][owner: u32 an extent][padding to 2 MiB][extents …]

A slot describes one entry. Its token ids and its extent table lie in extents as well, chained: the last four bytes of
each name the next. ``owner[e]`` is 0 for a free extent, else its slot's number + 1, and is the free list.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"LIBRAKV2"
SUPERBLOCK_BYTES = 4096
SLOT_BYTES = 512
DATA_ALIGNMENT = 1 << 21
TRAJECTORY_BYTES = 63
MOST_WRITERS = 16

FREE, WRITING, DOOMED, READY = 0, 1, 2, 3
"""States of a slot. ``WRITING``: its extents are its writers' alone. ``DOOMED``: as that, but freed once they are gone.
``READY``: whole, readable, evictable."""

SUPERBLOCK = np.dtype(
    [
        ("magic", "S8"),
        ("layout", "S1024"),
        ("slots", "<u8"),
        ("extents", "<u8"),
        ("extent_bytes", "<u8"),
        ("data", "<u8"),
        ("total", "<u8"),
        ("weight_version", "<i8"),
        ("clock", "<u8"),
        ("changing", "<u8"),  # the process that changes metadata, or died doing so; 0 between changes
        ("evicted", "<u8"),
        ("refused", "<u8"),
        ("reaped", "<u8"),
        ("repaired", "<u8"),
    ]
)
WRITER = np.dtype([("pid", "<u8"), ("started", "<u8")])
SLOT = np.dtype(
    [
        ("seq", "<u8"),
        ("state", "<u4"),
        ("first_block", "<u4"),
        ("trajectory", f"S{TRAJECTORY_BYTES + 1}"),
        ("version", "<i8"),
        ("tokens", "<u4"),
        ("blocks", "<u4"),
        ("meta", "<u4"),
        ("metas", "<u4"),
        ("last_used", "<u8"),
        ("writers", WRITER, (MOST_WRITERS,)),
        ("unused", "V144"),
    ]
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Counts and offsets (bytes) of an arena of ``slots`` entries and ``extents`` extents."""

    slots: int
    extents: int
    extent_bytes: int

    @property
    def owner(self) -> int:
        """Where the owner table begins."""
        return SUPERBLOCK_BYTES + self.slots * SLOT_BYTES

    @property
    def data(self) -> int:
        """Where the extents begin: 2 MiB aligned, so that they can be registered and backed by huge pages."""
        return -(-(self.owner + 4 * self.extents) // DATA_ALIGNMENT) * DATA_ALIGNMENT

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self.data + self.extents * self.extent_bytes


def process_started(pid: int) -> int | None:
    """When ``pid`` started (clock ticks since boot), which tells it from a later process of the same number; None if
    it is dead, a zombie without threads included: that one writes no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] in (b"Z", b"X") and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1:
            return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19])
