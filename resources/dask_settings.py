"""The Dask settings under which the step graph runs well, applied to clusters that are launched here.

Invariant: what the user set in the environment (``DASK_…``) wins over these, and these over the user's config files.
"""

from __future__ import annotations

from typing import Any

import dask
from dask.utils import key_split

SETTINGS: dict[str, Any] = {
    # Stealing moves restricted tasks between eligible workers and so away from their KV.
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    # Continuations may wait long for a worker of their bucket; the plugin has deadlines of its own.
    "distributed.scheduler.no-workers-timeout": None,
    # Dask tries to connect to a worker that has just died for this long, and only then fetches from another one.
    "distributed.comm.timeouts.connect": "3s",
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.low-level-log-length": 10,
    "distributed.worker.profile.enabled": False,
    "distributed.diagnostics.computations.nframes": 0,
}


def inherited() -> dict[str, str]:
    """Environment variables that give a Dask process the present config with `SETTINGS` on top."""
    config = dask.config.merge(dask.config.global_config)
    dask.config.set(SETTINGS, config=config)
    return {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(config)}


_PREFIXES_KEPT = 4096


def forget_prefixes() -> None:
    """Empty Dask's memory of task keys' prefixes if it has grown. It keeps those of the last 100,000 keys, keys
    included (tens of megabytes a process), and no key of the step graph is ever seen twice."""
    if key_split.cache_info().currsize > _PREFIXES_KEPT:
        key_split.cache_clear()
