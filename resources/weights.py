"""The host store of published weights: versioned directories of safetensors with a checksum for every tensor.

Invariants: ``v000123/`` is there only when complete; publishing a version twice gives the same `WeightVersion` or a
`WeightError`, never other bytes under the same name; what `load_weights` returns has passed every checksum. Weight
directories in shared memory are 0700, named by run, and end with the run: released by their owner or reaped by the
next start once the owner is dead.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import getpid, getuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.native.checksum import crc32c
from libra.resources.durable import TEMPORARY, HeldLock, Holder, remove_leftovers, written_whole
from libra.resources.errors import WeightError
from libra.resources.types import WeightVersion

MODEL_FILE = "model.safetensors"
CHECKSUM_FILE = "checksums.json"
OWNER_FILE = "owner.lock"
SHARED_MEMORY = Path("/dev/shm")
DTYPES = (
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
"""Types of tensors that may be published; bfloat16 is no numpy type."""

Tensors = Mapping[str, NDArray[Any]]


def publish_weights(directory: Path, version: int, tensors: Tensors, extra_files: Mapping[str, bytes]) -> WeightVersion:
    """Write ``tensors`` (any shapes, types of `DTYPES`, names kept as given) and ``extra_files`` (``config.json``, …)
    as ``directory/v{version:06d}``, fsynced and renamed into place.

    Publishing the same content again returns the same `WeightVersion`; other content under a published version is a
    `WeightError`, and so is a tensor that cannot be stored.
    """
    from safetensors.numpy import save_file

    plain = {name: _storable(name, tensor) for name, tensor in tensors.items()}
    for name in extra_files:
        if name in (MODEL_FILE, CHECKSUM_FILE) or "/" in name:
            raise WeightError(f"extra file {name!r} of weights version {version}: use a plain file name of its own")
    checksums = _checksums(version, plain, extra_files)
    path = directory / version_name(version)
    weights = WeightVersion(version, str(path), checksums["digest"])
    if path.is_dir():
        return _published_again(weights, checksums)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_leftovers(directory)
    try:
        with written_whole(path, mode=0o700) as temporary:
            save_file(plain, temporary / MODEL_FILE, metadata={"format": "pt"})
            (temporary / CHECKSUM_FILE).write_text(json.dumps(checksums, indent=1))
            for name, data in extra_files.items():
                (temporary / name).write_bytes(data)
    except FileExistsError:
        return _published_again(weights, checksums)
    return weights


def load_weights(weights: WeightVersion) -> dict[str, NDArray[Any]]:
    """The tensors of a published version, each checked against its checksum, and all against ``weights.digest``.

    Raises `WeightError` naming the tensor, both values and what to do.
    """
    published = _published(weights)
    tensors = dict(_stored(weights))
    _compare(weights, published, {name: _entry(tensor) for name, tensor in tensors.items()})
    return tensors


def checked_tensors(weights: WeightVersion) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a published version one after the other, each checked before it is given out; `WeightError` as of
    `load_weights`, at the tensor that is wrong or, once all are out, for one that is missing."""
    published = _published(weights)
    found = {}
    for name, tensor in _stored(weights):
        found[name] = _entry(tensor)
        if found[name] != published.get(name):
            break
        yield name, tensor
    _compare(weights, published, found)


def check_weights(weights: WeightVersion) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Raise what `load_weights` would, holding one tensor at a time: for whoever lets another read the files. Returns
    the type and shape of every tensor."""
    published = _published(weights)
    _compare(weights, published, {name: _entry(tensor) for name, tensor in _stored(weights)})
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in published.items()}


def version_name(version: int) -> str:
    """The folder name of a version: ``v000123``."""
    return f"v{version:06d}"


def published_versions(directory: Path) -> list[int]:
    """The complete versions under ``directory``, ascending."""
    names = (re.fullmatch(r"v(\d{6,})", path.name) for path in directory.glob("v*"))
    return sorted(int(match[1]) for match in names if match)


def prune_weights(directory: Path, keep: int, also: set[int]) -> list[int]:
    """Remove all but the ``keep`` newest versions and those in ``also`` (still loaded or about to be); returns the
    versions removed. Each is renamed first, so that no half-removed version keeps its name."""
    versions = published_versions(directory)
    old = [version for version in versions[: max(0, len(versions) - keep)] if version not in also]
    for version in old:
        path = directory / version_name(version)
        doomed = path.with_name(f"{path.name}{TEMPORARY}{getpid()}-pruned")
        path.rename(doomed)
        shutil.rmtree(doomed)
    return old


# -- where a run's weights live -------------------------------------------------------------------

_YOUNG_SECONDS = 60.0
_owned: dict[Path, HeldLock] = {}
_owned_guard = threading.Lock()


def weight_directory(run_dir: Path, run: str, needed: int = 1 << 28, shared: Path = SHARED_MEMORY) -> Path:
    """A 0700 directory for the weights of ``run``, owned by this process until `release_weight_directory`.

    In ``shared`` if it has ``needed`` bytes free (all versions kept at once), else under ``run_dir``. What a dead owner
    left under the name is removed. `WeightError` if a living process owns it.
    """
    with _owned_guard:
        in_memory = shared.is_dir() and shutil.disk_usage(shared).free >= needed
        directory = shared / f"libra-{run}-weights" if in_memory else run_dir / "weights"
        if directory in _owned:
            return directory
        with suppress(FileExistsError):  # no directory: `_ours` says so
            directory.mkdir(mode=0o700, parents=not in_memory, exist_ok=True)
        if in_memory and not _ours(directory):
            raise WeightError(
                f"{directory} belongs to another user or is no directory; remove it or name the run otherwise"
            )
        lock = HeldLock.take(directory / OWNER_FILE, f"weights of run {run}")
        if lock is None:
            raise WeightError(
                f"{directory} is in use by {Holder.read(directory / OWNER_FILE)}; end that run, or start one of its own"
            )
        _empty(directory)
        _owned[directory] = lock
        return directory


def release_weight_directory(directory: Path) -> None:
    """Remove a directory of `weight_directory` and what is in it; a second call does nothing."""
    with _owned_guard:
        lock = _owned.pop(directory, None)
        if lock is not None:
            _remove(directory, lock)


def reap_weight_directories(shared: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's weight directories in ``shared`` whose owner is dead; returns them."""
    reaped = []
    for directory in sorted(shared.glob("libra-*-weights")):
        try:
            # A young directory without a lock file is one whose owner is just making it.
            young = not (directory / OWNER_FILE).exists() and time.time() - directory.lstat().st_mtime < _YOUNG_SECONDS
            if young or not _ours(directory):
                continue
            with _owned_guard:
                lock = None if directory in _owned else HeldLock.take(directory / OWNER_FILE, "reaper")
        except FileNotFoundError:
            continue  # its owner, or another reaper, has just removed it
        if lock is not None:
            _remove(directory, lock)
            reaped.append(directory)
    return reaped


def _ours(directory: Path) -> bool:
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == getuid()


def _remove(directory: Path, lock: HeldLock) -> None:
    """Remove the directory, its lock file last: while that is locked nobody else takes or reaps it."""
    _empty(directory)
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != OWNER_FILE:
            path.unlink()


# -- checksums ------------------------------------------------------------------------------------


def _storable(name: str, tensor: NDArray[Any]) -> NDArray[Any]:
    """The tensor in C order (safetensors writes an array's buffer as it lies in memory)."""
    if tensor.dtype.name not in DTYPES or not tensor.dtype.isnative:
        raise WeightError(
            f"tensor {name!r} has type {tensor.dtype!s}, which cannot be published; "
            f"convert it to one of {', '.join(DTYPES)}"
        )
    return np.require(tensor, requirements=["C"])


def _entry(tensor: NDArray[Any]) -> dict[str, Any]:
    return {"crc32c": f"{crc32c(tensor):08x}", "dtype": tensor.dtype.name, "shape": list(tensor.shape)}


def _digest(entries: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(entries, sort_keys=True).encode(), digest_size=16).hexdigest()


def _checksums(version: int, tensors: Tensors, extra_files: Mapping[str, bytes]) -> dict[str, Any]:
    entries = {name: _entry(tensor) for name, tensor in tensors.items()}
    files = {name: f"{crc32c(data):08x}" for name, data in extra_files.items()}
    return {"version": version, "digest": _digest(entries), "tensors": entries, "files": files}


def _read_checksums(path: Path) -> dict[str, Any]:
    try:
        checksums: dict[str, Any] = json.loads((path / CHECKSUM_FILE).read_text())
    except FileNotFoundError as error:
        raise WeightError(
            f"no published weights at {path}: {CHECKSUM_FILE} is missing (pruned, or the run has ended); "
            "publish them again"
        ) from error
    except ValueError as error:
        raise WeightError(f"{path / CHECKSUM_FILE} is damaged: {error}; publish the version again") from error
    missing = {"version", "digest", "tensors", "files"} - checksums.keys()
    if missing:
        raise WeightError(f"{path / CHECKSUM_FILE} lacks {', '.join(sorted(missing))}; publish the version again")
    return checksums


def _published(weights: WeightVersion) -> dict[str, Any]:
    """What was published of each tensor, if it is this version's directory."""
    path = Path(weights.path)
    checksums = _read_checksums(path)
    for key, expected in (("version", weights.version), ("digest", weights.digest)):
        if checksums[key] != expected:
            raise WeightError(
                f"weights at {path} have {key} {checksums[key]!r}, but version {weights.version} with digest "
                f"{weights.digest!r} was asked for; publish that version again"
            )
    published: dict[str, Any] = checksums["tensors"]
    return published


def _stored(weights: WeightVersion) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors in the file, one after the other."""
    from safetensors import SafetensorError, safe_open

    file = Path(weights.path) / MODEL_FILE
    try:
        with safe_open(file, framework="numpy") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                yield name, stored.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise WeightError(f"cannot read {file}: {error}; publish version {weights.version} again") from error


def _compare(weights: WeightVersion, published: dict[str, Any], found: dict[str, Any]) -> None:
    for name in sorted(found.keys() | published.keys()):
        there, read = published.get(name, "absent"), found.get(name, "absent")
        if there != read:
            raise WeightError(
                f"tensor {name!r} of weights version {weights.version} at {weights.path} is damaged: published as "
                f"{there}, read as {read}; publish the version again"
            )
    if _digest(found) != weights.digest:
        raise WeightError(
            f"weights at {weights.path} have digest {_digest(found)!r}, published as {weights.digest!r}; "
            f"publish version {weights.version} again"
        )


def _published_again(weights: WeightVersion, checksums: dict[str, Any]) -> WeightVersion:
    """``weights`` if what lies there is the same content."""
    there = _read_checksums(Path(weights.path))
    for kind in ("tensors", "files"):
        for name in sorted(there[kind].keys() | checksums[kind].keys()):
            old, new = there[kind].get(name, "absent"), checksums[kind].get(name, "absent")
            if old != new:
                raise WeightError(
                    f"weights version {weights.version} is published at {weights.path} with other content: {name!r} is "
                    f"{old} there and {new} now; a version's weights never change, publish them as the next version"
                )
    return weights
