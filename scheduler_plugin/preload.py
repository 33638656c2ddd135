"""Registers the plugin on a scheduler: ``dask scheduler --preload libra.scheduler_plugin.preload``.

The plugin installs the worker side itself, so workers need the package but no option.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler

from libra.scheduler_plugin.plugin import LibraScheduler


async def dask_setup(server: Any, *_: str) -> None:
    """Called by Dask when the scheduler starts; a worker that is given the preload by mistake is left alone."""
    if isinstance(server, Scheduler):
        await server.register_scheduler_plugin(LibraScheduler(), idempotent=True)
