"""What the driver knows of the workers, from the plugin's events.

Invariants: ``installed`` is the lowest version over the rollout instances that take requests, None while there is none;
an instance counts only while its role is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from libra.pipeline.run.waits import Changes, Emit
from libra.pipeline.view.events import Failed, KVRefused, Note, Progress, RoleChanged
from libra.resources.errors import ClusterError, InfraError, ResidenceLostError


@dataclass(slots=True)
class Member:
    """One worker in its role."""

    role: str
    state: str
    version: int | None
    loads: int | None
    """The version that it will look for as it starts."""
    error: str | None
    hopeless: bool
    """Failed, and either never ready before or given up by the plugin."""


class Fleet:
    """Keeps roles and versions by worker; ``give_up(key, error)`` is called for a continuation that stayed unbound
    and for a residence whose worker is lost."""

    def __init__(self, emit: Emit, give_up: Callable[[str, BaseException], None]) -> None:
        self._emit, self._give_up = emit, give_up
        self.members: dict[str, Member] = {}
        self._been_ready: set[tuple[str, str]] = set()
        self.changes = Changes()

    def on_event(self, fields: dict[str, Any]) -> None:
        """One event of the plugin (`libra.resources.wire.EVENT`)."""
        now = time.time()
        match fields["event"]:
            case "role":
                member = self._member(fields)
                self.members[fields["worker"]] = member
                self._emit(RoleChanged(now, fields["worker"], member.role, member.state, member.error))
            case "weights":
                self._on_weights(fields, now)
            case "lost":
                self.members.pop(fields["worker"], None)
                self._emit(
                    Failed(now, "worker", fields["worker"], f"the {fields['role']} worker is gone", retried=True)
                )
            case "unbound":
                self._give_up(
                    fields["key"], InfraError(f"{fields['key']} was not bound to a worker: {fields['reason']}")
                )
            case "residence":
                self._give_up(fields["key"], ResidenceLostError(fields["reason"]))
            case "alarm":
                self._emit(Failed(now, "alarm", fields["where"], fields["error"]))
            case "replan":
                self._emit(Note(now, f"planner: {fields['action']}: {fields['reason']}"))
            case "kv_refused":
                self._emit(KVRefused(now, fields["reasons"]))
            case "progress":
                values = dict(fields["fields"])
                self._emit(Progress(now, str(values.pop("what", "cold start")), values))
            case unknown:
                self._emit(Note(now, f"the scheduler plugin sent an unknown event {unknown!r}"))
        self.changes.notify()

    @property
    def installed(self) -> int | None:
        """Lowest version over the ready rollout instances."""
        versions = [m.version for m in self.members.values() if m.role == "rollout" and m.state == "ready"]
        known = [v for v in versions if v is not None]
        return min(known) if known and len(known) == len(versions) else None

    @property
    def loading(self) -> set[int]:
        """Versions that starting engines will look for: not to be pruned, however old they are by then."""
        return {m.loads for m in self.members.values() if m.loads is not None}

    def describe(self, role: str) -> str:
        """The workers of a role and their states, for messages."""
        found = [
            f"{name}: {m.state}" + (f" ({m.error})" if m.error else "")
            for name, m in self.members.items()
            if m.role == role
        ]
        return "; ".join(found) or f"no {role} worker"

    def check(self) -> None:
        """`ClusterError` with the workers' own words if all that have a role failed at their first start (which
        another try will not change), or were given up."""
        for role in {m.role for m in self.members.values()}:
            if all(m.hopeless for m in self.members.values() if m.role == role):
                raise ClusterError(f"no worker can take the {role} role: {self.describe(role)}")

    async def until_ready(self, role: str) -> None:
        """Until a worker of ``role`` is ready. Raises what `check` raises."""
        while not any(m.role == role and m.state == "ready" for m in self.members.values()):
            self.check()
            await self.changes.wait()

    async def until_installed(self, version: int) -> None:
        """Until every ready rollout instance (at least one) has loaded ``version``. Raises what `check` raises."""
        while (installed := self.installed) is None or installed < version:
            self.check()
            await self.changes.wait()

    def _member(self, fields: dict[str, Any]) -> Member:
        worker, role, state = fields["worker"], fields["role"], fields["state"]
        if state == "ready":
            self._been_ready.add((worker, role))
        hopeless = state == "failed" and (fields["given_up"] or (worker, role) not in self._been_ready)
        return Member(role, state, fields.get("version"), fields.get("loads"), fields.get("error"), hopeless)

    def _on_weights(self, fields: dict[str, Any], now: float) -> None:
        member = self.members.get(fields["worker"])
        if fields.get("error"):
            self._emit(
                Failed(now, "worker", fields["worker"], f"weights {fields['version']}: {fields['error']}", retried=True)
            )
        elif member is not None:
            member.version = fields["version"]
