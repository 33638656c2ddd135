"""The Dask cluster of a run: a local one of its own, a running one by address, or the user's own client.

Invariant: a client that comes from here was checked: its scheduler has the plugin, of these versions.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from distributed import Client

from libra.pipeline.config import RunConfig
from libra.resources.cluster.attach import attached, check
from libra.resources.cluster.devices import Gpu, deal, gpus_here
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.tags import Role


@dataclass(frozen=True, slots=True)
class Connection:
    """A client of the cluster, and where its dashboard is."""

    client: Client
    dashboard: str | None


@asynccontextmanager
async def connected(config: RunConfig, client: Client | None, logs: Path) -> AsyncIterator[Connection]:
    """The cluster that ``client`` is of, else the one at ``cluster.scheduler``, else a local one, closed at the end.

    ``logs``: folder of a local cluster's process output. Raises `ClusterError`.
    """
    if client is not None:
        await check(client)
        yield Connection(client, client.dashboard_link)
    elif config.cluster.scheduler is not None:
        async with attached(config.cluster.scheduler) as own:
            yield Connection(own, own.dashboard_link)
    else:
        async with local_cluster(config, logs) as cluster, Client(cluster, asynchronous=True) as own:
            yield Connection(own, cluster.dashboard_link if config.cluster.dashboard else None)


def local_cluster(config: RunConfig, logs: Path) -> LibraLocalCluster:
    """The local cluster that ``config`` asks for, not started yet. `ClusterError` if this machine has GPUs, but fewer
    than its instances want."""
    slots: dict[Role, int] = {"rollout": config.cluster.rollout_slots, "tool": config.cluster.tool_slots}
    return LibraLocalCluster(
        config.workers,
        slots=slots,
        gpus=_gpus(config),
        host=config.cluster.host,
        dashboard=config.cluster.dashboard,
        logs=logs,
        start_seconds=config.deadlines.start,
        stop_seconds=config.deadlines.stop,
        asynchronous=True,
    )


def _gpus(config: RunConfig) -> dict[str, tuple[Gpu, ...]]:
    """Each instance's own GPUs, as many as its TP degree, on a machine that has any; other kinds than vLLM use none.
    Instances take the buckets in the order of their names (`libra.scheduler_plugin.assignment`)."""
    if config.engine.kind != "vllm" or not (here := gpus_here(os.environ)):
        return {}
    return deal({f"rollout-{number}": tp for number, tp in enumerate(config.degrees)}, here)
