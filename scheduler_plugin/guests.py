"""A user's own tasks on a claimed cluster: they never land on rollout or train workers.

While a run holds the cluster, every foreign task without a restriction of its own asks for `GUEST`, which only workers
without a rollout or train role offer; tasks that a user restricted are left where the user put them. Workers go on
offering `GUEST` when no run holds the cluster, so what was restricted once still runs.

Invariant: restrictions change only while a task is not on a worker (Dask books resources by them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libra.resources.tags import GUEST
from libra.scheduler_plugin.retag import recall, stimulus

_GUEST = {GUEST: 1}


def restrict(task: Any) -> None:
    """Keep a foreign task that is not on a worker off rollout and train workers."""
    if not (task.resource_restrictions or task.worker_restrictions or task.host_restrictions):
        task.resource_restrictions = _GUEST


def restrict_all(scheduler: Any, ours: Callable[[Any], Any], off_limits: Callable[[str], bool]) -> None:
    """A run takes the cluster: restrict the foreign tasks that are there, and call back those that wait on workers that
    are now off limits (by address)."""
    stimulus_id = stimulus("guests")
    requeued = {}
    for key, task in scheduler.tasks.items():
        if ours(key):
            continue
        if task.state != "processing":
            restrict(task)
            if task.state == "queued" and task.resource_restrictions is _GUEST:
                requeued[key] = "released"  # the queue ignores restrictions; wanted tasks come back by themselves
        elif not task.resource_restrictions and off_limits(task.processing_on.address):
            recall(scheduler, task.processing_on, task, stimulus_id)
    scheduler.transitions(requeued, stimulus_id)
