"""A Dask worker preload: the network takes its time to carry staged KV from this worker to others."""

from __future__ import annotations

import asyncio
from typing import Any

from libra.tasks.kv_fetch import KVServer, Reply

SECONDS = 0.5
"""A chunk."""

_chunk = KVServer.chunk


async def _slowly(self: KVServer, **request: Any) -> Reply:
    await asyncio.sleep(SECONDS)
    return _chunk(self, **request)


KVServer.chunk = _slowly  # type: ignore[method-assign, assignment]
