"""CRC-32C checksums, computed by the native module ``_checksum`` with the GIL released.

Invariant: the checksum depends on the bytes alone (not on dtype, shape or byte order of the machine), and
``crc32c(b, crc32c(a)) == crc32c(a + b)``.
"""

from __future__ import annotations

import numpy as np

from libra.native import _checksum


def crc32c(data: bytes | memoryview | np.ndarray, seed: int = 0) -> int:
    """CRC-32C of ``data`` (unsigned, 32 bits), continuing from ``seed``.

    Arrays must be C-contiguous; a ``ValueError`` names the strides otherwise.
    """
    if isinstance(data, bytes):
        return int(_checksum.crc32c_bytes(data, seed))
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError(f"crc32c needs a C-contiguous array, got strides {data.strides}: copy it first")
        return int(_checksum.crc32c_array(data.reshape(-1).view(np.uint8), seed))
    return int(_checksum.crc32c_array(np.frombuffer(data, np.uint8), seed))
