"""Files and directories that appear whole or not at all, and locks that end with their holder.

Invariants: a directory made by `written_whole` has its final name only once every file in it is on disk; whatever a
crash leaves behind carries ``.tmp-`` in its name and is removed by `remove_leftovers`. A `HeldLock` is held by the
kernel (``flock``), so a dead process holds none, whatever its pid is used for now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TEMPORARY = ".tmp-"


def sync_path(path: Path) -> None:
    """fsync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """fsync every file and directory under ``directory``, itself last. Several at once: the file system then commits
    them as one."""
    files: list[Path] = []
    directories: list[Path] = []
    for root, _, names in os.walk(directory):
        directories.append(Path(root))
        files.extend(Path(root, name) for name in names)
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(sync_path, files))
        list(pool.map(sync_path, reversed(directories)))


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a small file whole: under a temporary name, fsync, rename, fsync the directory."""
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    with naming(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_path(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An ``OSError`` of the block that names no file (a write to a full disk names none) names ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def written_whole(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """A temporary sibling directory that becomes ``path`` when the block ends without an error; ``mode`` as for mkdir.

    Raises ``FileExistsError`` when ``path`` is there by then; the temporary directory is removed on every error.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    temporary.mkdir(mode=mode)
    try:
        with naming(path):
            yield temporary
            sync_tree(temporary)
        try:
            temporary.rename(path)
        except OSError as error:
            if path.exists():
                raise FileExistsError(f"{path} exists already") from error
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_path(path.parent)


def remove_leftovers(directory: Path) -> list[str]:
    """Remove what crashed writers left in ``directory``; returns the names. A living process's work is left alone."""
    removed = []
    for path in sorted(directory.glob(f"*{TEMPORARY}*")):
        pid = path.name.rpartition(TEMPORARY)[2].split("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and _alive(int(pid)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        removed.append(path.name)
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock: ``pid`` on ``host``, since ``started`` (Unix seconds), and what it says it is."""

    pid: int
    host: str
    started: float
    purpose: str

    @classmethod
    def here(cls, purpose: str) -> Self:
        """This process, now."""
        return cls(os.getpid(), socket.gethostname(), time.time(), purpose)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The holder written in a lock file; None when it says nothing readable (its writer is just starting)."""
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            return cls(**fields)
        except (OSError, ValueError, TypeError):
            return None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} on {self.host} ({self.purpose}, since {since})"


class HeldLock:
    """An exclusive lock on a file, held until `release` or the end of this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def take(cls, path: Path, purpose: str) -> Self | None:
        """The lock, or None when another process (or this one) holds it; `Holder.read` then says who."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError:
                os.close(descriptor)
                raise
            # The last holder may have removed the file between the two calls: a lock on a removed file locks nothing.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break
            os.close(descriptor)
        holder = Holder.here(purpose)
        text = {"pid": holder.pid, "host": holder.host, "started": holder.started, "purpose": holder.purpose}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(text).encode(), 0)
        return cls(path, descriptor)

    @staticmethod
    def taken(path: Path) -> bool:
        """Whether a process holds the lock now. Writes nothing, and needs no more than the right to read. Raises
        ``OSError`` if that is missing."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Give the lock up; the file stays. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
