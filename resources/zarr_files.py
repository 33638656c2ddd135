"""A small writer and reader of zarr v3 groups of one-dimensional arrays, as plain files.

zarr-python spends about 2 ms of interpreter time on each array it makes and 0.4 s on its import; a training step has
some thirty arrays, most of them tiny, and the process that writes them also drives the run. This module writes the same
files by the zarr v3 specification (regular chunks; codecs ``bytes``, ``gzip``, ``crc32c``) in a few milliseconds;
zarr-python, dask and every other zarr reader open them.

Invariants: equal arrays and attributes give equal bytes; every chunk carries its CRC-32C, so damage is an error and
never data; a chunk file that is missing is an error too (zarr itself would read it as zeros).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.native.checksum import crc32c
from libra.resources.errors import StoreError

CHUNK_BYTES = 1 << 24
"""Largest chunk: 16 MiB before compression."""
COMPRESS_BYTES = 1 << 20
"""Integer arrays from this size on are compressed; smaller ones and floats gain nothing that is worth the time."""


def encode_group(arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """The files (relative path → bytes) of a group that holds ``arrays``, each of shape (n,); ``a/b`` is array ``b`` in
    group ``a``. ``attributes`` are plain JSON values of the root group."""
    files = {"zarr.json": _json({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})}
    for name, array in arrays.items():
        for parent in Path(name).parents[:-1]:
            files[f"{parent}/zarr.json"] = _json({"zarr_format": 3, "node_type": "group", "attributes": {}})
        files |= {f"{name}/{file}": data for file, data in _encode_array(array).items()}
    return files


def read_attributes(path: Path) -> dict[str, Any]:
    """The attributes of the group at ``path``. `StoreError` names what is missing or damaged."""
    attributes = _read_json(path / "zarr.json").get("attributes")
    if not isinstance(attributes, dict):
        raise StoreError(
            f"{path / 'zarr.json'} describes no group: it has no attributes; restore it or remove its step"
        )
    return attributes


def read_array(path: Path, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Elements ``start`` to ``stop`` of array ``name`` of the group at ``path``, as a writable array; only the chunks
    that hold them are read. `StoreError` names the file that is missing or damaged."""
    folder = path / name
    metadata = _read_json(folder / "zarr.json")
    try:
        (length,), dtype = metadata["shape"], np.dtype(metadata["data_type"]).newbyteorder("<")
        (chunk,) = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        compressed = [codec["name"] for codec in metadata["codecs"]] == ["bytes", "gzip", "crc32c"]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{folder / 'zarr.json'} does not describe an array of this store: {error!r}") from error
    stop = length if stop is None else min(stop, length)
    if start >= stop:
        return np.empty(0, dtype.newbyteorder("="))
    first = start // chunk
    parts = [
        _decode_chunk(folder / f"c.{index}", dtype, chunk, compressed)
        for index in range(first, (stop - 1) // chunk + 1)
    ]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole[start - first * chunk : stop - first * chunk].astype(dtype.newbyteorder("="))


def _encode_array(array: NDArray[Any]) -> dict[str, bytes]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    (length,), item = little.shape, little.dtype.itemsize
    compress = little.dtype.kind in "iu" and little.nbytes >= COMPRESS_BYTES
    chunk = max(1, min(length, CHUNK_BYTES // item))
    files = {"zarr.json": _json(_array_metadata(little, chunk, compress))}
    for index, start in enumerate(range(0, length, chunk)):
        data = little[start : start + chunk].tobytes()
        # The specification wants every chunk whole: the last one is filled up with the fill value.
        data += bytes(chunk * item - len(data))
        if compress:
            data = gzip.compress(data, compresslevel=1, mtime=0)
        files[f"c.{index}"] = data + crc32c(data).to_bytes(4, "little")
    return files


def _array_metadata(array: NDArray[Any], chunk: int, compress: bool) -> dict[str, Any]:
    byte_order = {"name": "bytes", "configuration": {"endian": "little"}} if array.itemsize > 1 else {"name": "bytes"}
    squeeze = [{"name": "gzip", "configuration": {"level": 1}}] if compress else []
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0.0 if array.dtype.kind == "f" else 0,
        "codecs": [byte_order, *squeeze, {"name": "crc32c"}],
        "attributes": {},
    }


def _decode_chunk(path: Path, dtype: np.dtype[Any], length: int, compressed: bool) -> NDArray[Any]:
    try:
        stored = path.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: the store is incomplete; restore it or remove its step") from error
    data, expected = stored[:-4], int.from_bytes(stored[-4:], "little")
    found = crc32c(data)
    if found != expected:
        raise StoreError(
            f"{path} is damaged: CRC-32C {found:08x}, written as {expected:08x}; restore it or remove its step"
        )
    try:
        plain = gzip.decompress(data) if compressed else data
    except (OSError, EOFError, zlib.error) as error:
        raise StoreError(f"{path} cannot be decompressed: {error}; restore it or remove its step") from error
    if len(plain) != length * dtype.itemsize:
        raise StoreError(
            f"{path} holds {len(plain)} bytes, its array's chunks have {length * dtype.itemsize}; "
            "restore it or remove its step"
        )
    return np.frombuffer(plain, dtype)


def _json(value: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise StoreError(f"attributes of a zarr group must be plain, finite JSON values: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"a JSON object was expected, found {type(value).__name__}")
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: no such step, or an incomplete store; restore it or remove it") from error
    except NotADirectoryError as error:
        raise StoreError(f"{path.parent} is a file, not a zarr group") from error
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}; restore it or remove its step") from error
    return value
