"""Changing what a worker offers while tasks run: the retag protocol.

`Worker.set_resources` alone loses tasks: nothing wakes those that wait for the new tag, and those sent before the
change wait on the worker for ever. Here the scheduler's books change first, the worker is told on the same ordered
stream that carries tasks, what it has not started is called back, and what waits is looked at again.

Invariants: a tag is never deleted, only set to 0 (a worker does not know how to refuse a tag it has never heard of);
a task that asks for a tag reaches a worker only after the worker knows that it offers it; resources that are not tags
of ours are left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from libra.resources import wire
from libra.resources.tags import GUEST, REWARD, TOOL, TRAIN

GUEST_QUANTITY = 1_000_000
"""So many guests may run on a worker as its threads allow."""

_stimuli = itertools.count()


def stimulus(what: str) -> str:
    """A fresh stimulus id for Dask's logs."""
    return f"libra-{what}-{next(_stimuli)}"


def is_tag(resource: str) -> bool:
    """Whether a Dask resource is a tag that this system publishes."""
    return resource in (GUEST, REWARD, TOOL, TRAIN) or resource.startswith("rollout:")


def offered(worker: Any) -> dict[str, float]:
    """The tags that a worker (``WorkerState``) offers now, zeros left out."""
    return {tag: quantity for tag, quantity in worker.resources.items() if quantity and is_tag(tag)}


def retag(scheduler: Any, worker: Any, tags: Mapping[str, float]) -> None:
    """From now on ``worker`` offers ``tags`` and no other tag of ours. Synchronous; tasks that wait are not yet woken
    (`wake`), so that the caller can first decide where they belong."""
    stimulus_id = stimulus("retag")
    resources = {name: 0.0 for name in worker.resources if is_tag(name)} | dict(tags)
    used = dict(worker.used_resources)
    scheduler.add_resources(worker.address, resources)
    worker.used_resources.update({name: used.get(name, 0) for name in worker.resources})
    message = {"op": wire.RETAG, "resources": resources, "stimulus_id": stimulus_id}
    scheduler.worker_send(worker.address, message)
    for task in list(worker.processing):
        wants = task.resource_restrictions
        if wants and any(worker.resources.get(name, 0) < quantity for name, quantity in wants.items()):
            recall(scheduler, worker, task, stimulus_id)


def recall(scheduler: Any, worker: Any, task: Any, stimulus_id: str) -> None:
    """Ask for a task back if the worker has not started it."""
    scheduler.worker_send(worker.address, {"op": wire.RECALL, "key": task.key, "stimulus_id": stimulus_id})


def wake(scheduler: Any, worker: Any) -> None:
    """Look again at the tasks that no worker could take: this one may now."""
    scheduler.transitions(scheduler.bulk_schedule_unrunnable_after_adding_worker(worker), stimulus("wake"))


def take_away(scheduler: Any, worker: Any, tag: str) -> None:
    """Take every task that asks for ``tag`` away from ``worker``, started or not; each is placed anew at once. Results
    that the worker still sends for them are refused by Dask's run ids."""
    tasks = {task.key: "released" for task in worker.processing if tag in (task.resource_restrictions or ())}
    if tasks:
        scheduler.transitions(tasks, stimulus("take-away"))
