"""The native CRC-32C against the definition of the polynomial, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.native.checksum import crc32c


def slow_crc32c(data: bytes, seed: int = 0) -> int:
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_check_value_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_equals_the_bitwise_definition(data: bytes, seed: int) -> None:
    assert crc32c(data, seed) == slow_crc32c(data, seed)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_continues_from_a_seed(first: bytes, second: bytes) -> None:
    assert crc32c(second, crc32c(first)) == crc32c(first + second)


@given(st.binary(max_size=64), st.integers(0, 8))
def test_arrays_and_views_give_the_checksum_of_their_bytes(data: bytes, skip: int) -> None:
    view = memoryview(data)[skip:]
    assert crc32c(view) == crc32c(np.frombuffer(data, np.uint8)[skip:]) == crc32c(bytes(view))
    floats = np.arange(len(data), dtype=np.float32).reshape(1, -1)
    assert crc32c(floats) == crc32c(floats.tobytes())


def test_a_strided_array_is_refused_by_its_strides() -> None:
    with pytest.raises(ValueError, match=r"strides \(8,\)"):
        crc32c(np.arange(10, dtype=np.int32)[::2])
