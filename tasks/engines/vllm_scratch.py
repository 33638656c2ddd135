"""The scratch folder of one vLLM engine, its shared memory, and the process that clears both away.

vLLM's processes keep sockets and rendezvous files in a folder, and shared memory and semaphores by name. Whoever kills
them leaves these behind, so they belong to an *undertaker*: multiprocessing's resource tracker, which its processes
tell of what they make and which ends when the last of them has ended, run in a session of its own so that a kill of the
engine's process group passes it by. Invariants: when the last process of an engine is gone, in whatever way, its
undertaker removes what it had; an undertaker that was killed itself leaves a folder that the next engine on this
machine clears away.

``python -m libra.tasks.engines.vllm_scratch FD FOLDER`` is the undertaker.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from libra.resources.durable import HeldLock

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "libra-vllm-"
_OWNER_FILE = "owner.lock"
_ERRORS_FILE = "errors"
_LOGGING_FILE = "logging.json"
_SEGMENTS_FILE = "segments"
_LONGEST_ROOT = 60
"""Characters of the folder's parent at most: a socket's path has 107."""
_YOUNG_SECONDS = 60.0
_ERROR_BYTES = 2000


class Scratch:
    """A new folder (0700) for one engine, whose processes are started by this one.

    Its undertaker waits for all of them; where this process has used multiprocessing before, it has a resource tracker
    already, and the undertaker waits for `close` or this process's end."""

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        if len(str(root)) > _LONGEST_ROOT:
            root = Path("/tmp")
        reap(root)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        (self.path / _LOGGING_FILE).write_text(json.dumps(_logging(self.path / _ERRORS_FILE)))
        self._pipe = _hire(self.path)

    def environment(self) -> dict[str, str]:
        """The variables that keep vLLM's files in the folder and its errors where `first_error` finds them."""
        return {
            "TMPDIR": str(self.path),
            "VLLM_RPC_BASE_PATH": str(self.path),
            "VLLM_LOGGING_CONFIG_PATH": str(self.path / _LOGGING_FILE),
        }

    def first_error(self) -> str | None:
        """The words of the first exception that any of vLLM's processes has logged."""
        try:
            return (self.path / _ERRORS_FILE).read_text(errors="replace")
        except FileNotFoundError:
            return None

    def note_segments(self) -> None:
        """The engine is up: remember what its ranks name their shared memory after. vLLM removes the file of that name
        at an orderly end, but not the memory."""
        (self.path / _SEGMENTS_FILE).write_text("\n".join(path.name for path in self.path.glob("vllm_dist_*")))

    def close(self) -> None:
        """The engine's processes have ended; a second call does nothing."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class FirstError(logging.Handler):
    """Keeps the first exception that is logged, over all processes that log to the same ``path``."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info or record.exc_info[1] is None:
            return
        error = record.exc_info[1]
        if type(error).__name__ == "EngineDeadError":
            return  # it says that another process has failed
        where = traceback.extract_tb(error.__traceback__)[-1:]
        at = f" ({where[0].filename}:{where[0].lineno})" if where else ""
        text = f"{record.processName}: {type(error).__name__}: {str(error)[:_ERROR_BYTES]}{at}"
        try:
            with self._path.open("x") as file:
                file.write(text)
        except FileExistsError:
            return
        except OSError:
            self.handleError(record)


def reap(root: Path, shared: Path = SHARED_MEMORY) -> list[Path]:
    """Clear away what this user's engines under ``root`` left whose undertaker was killed; returns their folders."""
    reaped = []
    for folder in sorted(root.glob(f"{_PREFIX}*")):
        try:
            status = folder.lstat()
            # A young folder without a lock file is one whose undertaker is just coming.
            young = not (folder / _OWNER_FILE).exists() and time.time() - status.st_mtime < _YOUNG_SECONDS
            ours = folder.is_dir() and not folder.is_symlink() and status.st_uid == os.getuid()
            lock = HeldLock.take(folder / _OWNER_FILE, "reaper") if ours and not young else None
        except FileNotFoundError:
            continue  # its undertaker, or another reaper, has just removed it
        if lock is not None:
            clear(folder, shared)
            lock.release()
            reaped.append(folder)
    return reaped


def clear(folder: Path, shared: Path = SHARED_MEMORY) -> None:
    """Remove an ended engine's folder, and the shared memory that its ranks named after their rendezvous file there."""
    names = {path.name for path in folder.glob("vllm_dist_*")}
    with suppress(FileNotFoundError):
        names |= set((folder / _SEGMENTS_FILE).read_text().split())
    for name in names:
        for segment in shared.glob(f"{name}*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _hire(folder: Path) -> int | None:
    """Start the undertaker, as the resource tracker of this process and of all that it starts; a pipe to be closed if
    there is one already."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(read), str(folder)],
        stdin=subprocess.DEVNULL,
        pass_fds=(read,),
        start_new_session=True,
    )
    os.close(read)
    # No public way leads here; a Python that has renamed these fails loudly, as the engine starts.
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        return write
    tracker._fd, tracker._pid = write, process.pid
    return None


def _logging(errors: Path) -> dict[str, object]:
    """vLLM's logging: lines to the standard error, exceptions noted as well."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(processName)s (%(process)d): %(message)s"}},
        "handlers": {
            "lines": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"},
            "errors": {"class": f"{__name__}.FirstError", "path": str(errors)},
        },
        "loggers": {"vllm": {"level": "INFO", "handlers": ["lines", "errors"], "propagate": False}},
    }


def _bury(read: int, folder: Path) -> None:
    """The undertaker's life."""
    lock = HeldLock.take(folder / _OWNER_FILE, "undertaker of a vLLM engine")
    try:
        resource_tracker.main(read)
    finally:
        clear(folder)
        if lock is not None:
            lock.release()


if __name__ == "__main__":
    _bury(int(sys.argv[1]), Path(sys.argv[2]))
