"""A cluster written by hand, for planning without one: groups of equal nodes.

Invariant: a device belongs to one node and one group; nodes are numbered through all groups in order.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from libra.resources.config import Config
from libra.resources.specs import files


class DeviceGroup(Config):
    """Equal nodes."""

    hardware: str
    """Name of a hardware spec, or the path of one."""
    nodes: int = Field(ge=1)
    gpus_per_node: int | None = Field(default=None, ge=1)
    """None: that of the hardware spec."""
    network_gbit_per_s_per_node: float | None = Field(default=None, gt=0)
    """None: that of the hardware spec."""


class ClusterSpec(Config):
    """See conf/cluster."""

    name: str
    groups: tuple[DeviceGroup, ...] = Field(min_length=1)


def load_cluster(name: str | Path) -> ClusterSpec:
    """A shipped cluster by name, or one from a YAML file. Raises `ConfigError`."""
    source, data = files.read(name, "cluster", "cluster file")
    return files.parse(ClusterSpec, data, source)
