"""What a worker is for at the moment: the base of the four roles.

A role is made when the scheduler plugin asks for it, started once and stopped once. Invariants: `Role.start` returns
when the role can work (for a rollout: when its engine is up; it is *ready* once weights are loaded) or raises; `stop`
ends its processes whatever state it is in; nothing here imports torch, models live in child processes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from libra.resources import tags
from libra.resources.types import KVRoom
from libra.resources.types.run import RunSpec
from libra.tasks.envs import calls
from libra.tasks.envs.base import Environment, EnvironmentConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """What a role is made from. ``tp``: the TP degree of a rollout's bucket. ``worker``: the Dask worker's name, and
    ``node``: the label or host of where it runs (`libra.resources.tags.node_of`); ``peer`` gives Dask's RPC to another
    worker's address. ``on_lost`` is called with why when a
    ready role's child process has died; ``on_progress`` with plain values that a person may want to see."""

    spec: RunSpec
    epoch: int
    tp: int | None
    worker: str
    node: str
    peer: Callable[[str], Any]
    on_lost: Callable[[str], None]
    on_progress: Callable[[dict[str, Any]], None]

    def log(self, role: tags.Role) -> Path:
        """The file that the role's child process prints to."""
        worker = re.sub(r"[^A-Za-z0-9.]+", "_", self.worker)
        return Path(self.spec.run_dir) / "logs" / f"{role}-{worker}-{self.epoch}.log"


class Role(ABC):
    """One role on one worker, in one epoch."""

    name: ClassVar[tags.Role]

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.spec, self.epoch = setting.spec, setting.epoch

    @abstractmethod
    async def start(self) -> None:
        """Bring the role up. Raises what is wrong; cancelling it leaves nothing behind."""

    async def stop(self) -> None:  # noqa: B027 - roles without processes have nothing to end
        """End its processes and sessions. Work that is still running fails with `InfraError`."""

    def forget(self, trajectories: Iterable[str]) -> None:  # noqa: B027 - most roles remember nothing
        """These trajectories have ended: drop what is kept for them."""

    @property
    def ready(self) -> bool:
        """Whether a role that has started can work (a rollout role: once weights are loaded)."""
        return True

    @property
    def version(self) -> int | None:
        """The version of the loaded weights; None for roles without."""
        return None

    @property
    def kv_room(self) -> KVRoom | None:
        """What the KV cache of a ready rollout role holds; None for roles without."""
        return None

    def slots(self, threads: int) -> int:
        """How many tasks it takes at once, on a worker with ``threads`` task slots."""
        return threads

    def stats(self) -> dict[str, Any]:
        """Plain numbers for the heartbeat."""
        return {}


def make_environment(spec: RunSpec) -> Environment:
    """The run's environment. `ConfigError` if there is no such kind or its options are wrong."""
    return calls.make_environment(EnvironmentConfig(**spec.environment), spec.tokenizer, spec.seed)
