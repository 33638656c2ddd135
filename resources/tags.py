"""Names of roles and of the Dask resources that carry them.

Invariants: a worker offers the tag of a role only while the role is ready; `UNBOUND` is offered by no worker, so a
continuation that was not bound can run nowhere. Quantities of the reserved names are given by launchers and are not
used for placement yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Role = Literal["rollout", "tool", "reward", "train"]
ROLES: tuple[Role, ...] = get_args(Role)

UNBOUND = "rollout:unbound"
TOOL = "tool"
REWARD = "reward"
TRAIN = "train"
GUEST = "guest"
"""Offered by workers that may run a user's own untagged tasks (every worker but rollout and train)."""

GPU_MEMORY = "gpu-memory"
CPU = "cpu"
HOST_MEMORY = "host-memory"
NETWORK = "network"
RESERVED = (GPU_MEMORY, CPU, HOST_MEMORY, NETWORK)
"""Reserved names: bytes, cores, bytes and bytes/s."""


def rollout_tag(tp: int) -> str:
    """The tag of the bucket with TP degree ``tp``: ``rollout:tp2``."""
    return f"rollout:tp{tp}"


def capability(role: Role) -> str:
    """The resource a launcher gives a worker to say that it may take ``role``: ``capable:rollout``, with the slots as
    its quantity."""
    return f"capable:{role}"


def hardware_of(resources: Mapping[str, float]) -> str | None:
    """The kind of hardware that a worker says it has, by a resource ``hardware:<kind>``; else None."""
    labels = (name.removeprefix("hardware:") for name in resources if name.startswith("hardware:"))
    return next(labels, None)


def node_of(resources: Mapping[str, float], host: str) -> str:
    """The node that a worker says it is on, by a resource ``node:<label>``; else its host."""
    labels = (name.removeprefix("node:") for name in resources if name.startswith("node:"))
    return next(labels, host)
