"""How a task's body runs on its worker: it finds its role, leaves its result, and can be cancelled.

Dask does not cancel a coroutine whose task is released; the worker plugin does, through `Bodies`. Invariants: a body
that is cancelled ends at once with ``Reschedule``, which Dask drops for a task that nobody wants any more and obeys for
one that was wanted again in the meantime; no body begins after its task was called back; a body's result is in the
task's metadata before the task finishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from distributed import Reschedule, Worker, get_worker

from libra.resources import wire
from libra.resources.codec import unpack
from libra.resources.errors import InfraError
from libra.tasks.line import Line
from libra.tasks.roles import Role

Request = dict[str, Any]
R = TypeVar("R", bound=Role)
T = TypeVar("T")


class Host(Protocol):
    """What a body needs of the worker plugin."""

    worker: Worker
    bodies: Bodies
    line: Line
    role: Role | None
    state: str


class Bodies:
    """The bodies that are running on one worker, by task key."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._cancelled: set[str] = set()
        self._called_back: set[str] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()`` as the body of the task ``key``, unless the task was called back."""
        if key in self._called_back:
            self._called_back.discard(key)
            raise Reschedule
        task = asyncio.current_task()
        assert task is not None
        self._running[key] = task
        try:
            return await work()
        except asyncio.CancelledError:
            if key not in self._cancelled:
                raise  # the worker is closing
            task.uncancel()
            raise Reschedule from None
        finally:
            del self._running[key]
            self._cancelled.discard(key)

    def cancel(self, key: str) -> None:
        """End the body of ``key`` if it is running."""
        task = self._running.get(key)
        if task is not None and key not in self._cancelled:
            self._cancelled.add(key)
            task.cancel()

    def call_back(self, key: str) -> None:
        """Dask has begun the task ``key``, which is wanted elsewhere: give it back if its first line has not run."""
        if key not in self._running:
            self._called_back.add(key)


def this_host() -> Host:
    """The worker plugin of the worker that this runs on."""
    host: Host = get_worker().extensions[wire.EXTENSION]
    return host


def annotation(key: str) -> dict[str, Any]:
    """What the scheduler plugin wrote on the task ``key`` of this worker as it bound it; empty if nothing."""
    written: dict[str, Any] = (this_host().worker.state.tasks[key].annotations or {}).get(wire.ANNOTATION, {})
    return written


async def run_body(
    role_class: type[R], blob: bytes, work: Callable[[R, Request], Awaitable[tuple[dict[str, Any], T]]]
) -> T:
    """Run ``work(role, request)`` for the task that ``blob`` describes; it returns the task's metadata and its value.

    `InfraError` if the worker does not have the role, ready (any more).
    """
    host = this_host()
    request: Request = unpack(blob)
    key, tasks = request["key"], host.worker.state.tasks
    if tasks[key].state not in ("executing", "long-running"):
        raise Reschedule  # released before its first line ran
    metadata, value = await host.bodies.run(key, lambda: work(_role(host, role_class, key), request))
    tasks[key].metadata[wire.METADATA] = metadata
    return value


def _role(host: Host, role_class: type[R], key: str) -> R:
    role = host.role
    # A lost role still tells, with its child's last words, why it does not work.
    if isinstance(role, role_class) and host.state in ("ready", "lost"):
        return role
    having = "no role" if role is None else f"the role {role.name!r} ({host.state})"
    raise InfraError(f"{key} needs a worker with the role {role_class.name!r}; {host.worker.name} has {having}")
