"""A Dask worker preload: the network takes its time to carry staged KV from this worker to others."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Worker

from libra.tasks.kv_fetch import KVServer, Reply

SECONDS = 0.5
"""A chunk."""


def dask_setup(worker: Worker) -> None:
    """Called by Dask in the worker's process, before it has plugins."""
    chunk = KVServer.chunk

    async def slowly(self: KVServer, **request: Any) -> Reply:
        await asyncio.sleep(SECONDS)
        return chunk(self, **request)

    KVServer.chunk = slowly  # type: ignore[method-assign, assignment]
