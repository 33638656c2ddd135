"""A run's hold on the cluster.

Invariants: at most one claim at a time; it ends when its driver releases it or its driver's client goes; while it ends,
its roles stop and nobody else may claim.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any

from libra.resources import wire
from libra.resources.errors import ClusterError, ConfigError
from libra.resources.types import Bucket
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.binding import Binder, Parts, split_key
from libra.scheduler_plugin.learned import Keeper
from libra.scheduler_plugin.policy import load_policy
from libra.scheduler_plugin.residences import Residences
from libra.scheduler_plugin.roles import Limits
from libra.scheduler_plugin.routing import RoutingTable

if TYPE_CHECKING:
    from libra.scheduler_plugin.replanning import Replanning

_BATCHES_KEPT = 4
"""A batch may be asked for again after a loss, but only until the next ones are trained."""


class Claim:
    """One run: what it asked for, its tables, its weights, its batches."""

    def __init__(self, spec: RunSpec, client: str) -> None:
        """Raises `ConfigError` for a policy or pool option that does not exist."""
        self.spec, self.client = spec, client
        self.message = spec.to_wire()
        self.token = secrets.token_hex(16)
        self.limits = limits_of(spec)
        buckets = [Bucket(tp or 1, max_context) for tp, max_context, _ in spec.buckets]
        self.table = RoutingTable(load_policy(spec.policy), buckets, staging=bool(spec.engine.get("kv_arena")))
        self.keeper: Keeper | None = None
        self.binder: Binder | None = None
        self.residences: Residences | None = None
        self.replanning: Replanning | None = None
        self.weights: dict[str, Any] | None = None
        self.ending = False
        self.ended = asyncio.Event()
        self.held: list[wire.Message] | None = []
        """Events from before the driver listens; None once it does."""
        self.began = time.monotonic()
        self._batches: dict[int, dict[str, Any]] = {}
        self._changed = asyncio.Event()

    @property
    def version(self) -> int | None:
        """Version of the current weights."""
        return None if self.weights is None else int(self.weights["version"])

    @property
    def holder(self) -> str:
        """How to name the run in messages."""
        return f"run {self.spec.name!r} ({self.spec.run}) of client {self.client}"

    def ours(self, key: Any) -> Parts | None:
        """The parts of a key of this run; None for a foreign one."""
        parts = split_key(key)
        return parts if parts is not None and parts[2] == self.spec.run else None

    def rebind_waiting(self) -> None:
        """Instances have changed: decide again where waiting tasks go."""
        if self.binder is not None:
            self.binder.rebind_waiting(self.ours)

    def set_weights(self, version: int, path: str, digest: str) -> None:
        """These are the current weights from now on."""
        self.weights = {"version": version, "path": path, "digest": digest}
        if self.binder is not None:
            self.binder.version = version

    def post(self, version: int, record: dict[str, Any]) -> None:
        """The batch that ``version`` is trained on is known."""
        self._batches[version] = record
        for old in sorted(self._batches)[:-_BATCHES_KEPT]:
            del self._batches[old]
        self._wake()

    async def batch(self, version: int) -> dict[str, Any]:
        """The batch of ``version`` once it is posted. `ClusterError` when the run ends before."""
        while version not in self._batches and not self.ending:
            await self._changed.wait()
        if version not in self._batches:
            raise ClusterError(f"{self.holder} ended before it posted the batch of version {version}")
        return self._batches[version]

    def end(self) -> None:
        """The run ends: whoever waits for a batch waits in vain."""
        self.ending = True
        if self.replanning is not None:
            self.replanning.end()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def limits_of(spec: RunSpec) -> Limits:
    """How long the waits of a run's roles may take, and how often they are restarted. `ConfigError` for a key of
    ``spec.pool`` that there is not."""
    unknown = set(spec.pool) - {"restarts", "backoff", "backoff_most", "stable", "drain"}
    if unknown:
        raise ConfigError(
            f"pool.{sorted(unknown)[0]} is unknown; pool takes restarts, backoff, backoff_most, stable, drain"
        )
    fields: dict[str, Any] = {
        **spec.pool,
        "start": spec.start_seconds,
        "load": spec.load_seconds,
        "stop": spec.stop_seconds,
    }
    return Limits(**fields)
