"""The worker plugin that the scheduler installs: it imports the real one by name, on the worker.

Invariant: neither the scheduler nor this module imports ``tasks``; what is pickled to a worker is one string.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from distributed import Worker, WorkerPlugin

WORKER = "libra.tasks.worker:LibraWorker"


class Bootstrap(WorkerPlugin):
    """Delegates to an instance of the class at ``path`` (``pkg.mod:Class``)."""

    name = "libra"
    idempotent = True

    def __init__(self, path: str = WORKER) -> None:
        self.path = path

    def setup(self, worker: Worker) -> Any:
        """Called by Dask on the worker."""
        module, _, name = self.path.partition(":")
        self.plugin: WorkerPlugin = getattr(import_module(module), name)()
        # Called for every change of every task: found on the instance, it costs one call less.
        self.transition = self.plugin.transition
        return self.plugin.setup(worker)

    def teardown(self, worker: Worker) -> Any:
        """Called by Dask as the worker closes."""
        return self.plugin.teardown(worker)
