"""Ties a process that a child's library has started by multiprocessing to the child.

Invariant: such a process is gone within a second of its host, whatever killed that and whoever stands between them,
from the moment that multiprocessing has set it up; nothing of the library is imported before.
"""

from __future__ import annotations

import os
import select
import threading

HOST_VARIABLE = "LIBRA_CHILD_HOST"
"""Names the host's process id to all that it starts."""


def announce_host() -> None:
    """What this process starts from now on may call `end_with_host`."""
    os.environ[HOST_VARIABLE] = str(os.getpid())


def end_with_host() -> None:
    """End this process at once when its host has ended."""
    try:
        host = os.pidfd_open(int(os.environ[HOST_VARIABLE]))
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_outlive, args=(host,), name="host-guard", daemon=True).start()


def _outlive(host: int) -> None:
    # Not PR_SET_PDEATHSIG: that follows the thread that started this process, and only to its own parent.
    select.select([host], [], [])
    os._exit(1)
