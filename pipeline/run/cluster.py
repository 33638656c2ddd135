"""The Dask cluster of a run: a local one, a running one by address, or the user's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from distributed import Client

from libra.pipeline.config import RunConfig
from libra.pipeline.run.waits import Emit


@dataclass(frozen=True, slots=True)
class Connection:
    """A client of the cluster, and where its dashboard is."""

    client: Client
    dashboard: str | None


@asynccontextmanager
async def connected(config: RunConfig, client: Client | None, emit: Emit) -> AsyncIterator[Connection]:
    if client is not None:
        yield Connection(client, client.dashboard_link)
        return
    async with Client(config.cluster.scheduler, asynchronous=True) as own:
        yield Connection(own, own.dashboard_link)
