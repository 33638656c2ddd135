"""A preload that ends a Dask process when the process that launched it is gone, however that died.

Invariant: a scheduler or worker with `LAUNCHER` in its environment ends within `POLL_SECONDS` + `GRACE_SECONDS` of its
parent's death; what it started watches it in turn.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

logger = logging.getLogger("distributed.libra")

LAUNCHER = "LIBRA_LAUNCHER"
"""Environment variable with the launcher's process id."""
POLL_SECONDS = 0.5
GRACE_SECONDS = 4.0


def dask_setup(server: Any, *_: str) -> None:
    """Called by Dask as the process starts."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
        threading.Thread(target=_watch, args=(server, int(launcher)), name="libra guard", daemon=True).start()


def _watch(server: Any, launcher: int) -> None:
    # A thread, so that a blocked event loop does not keep the process alive.
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    logger.warning("the process that launched this one (%d) is gone: closing", launcher)
    server.loop.add_callback(server.close)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
