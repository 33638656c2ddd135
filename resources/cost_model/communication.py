"""Seconds of collectives. Ring volumes: Thakur, Rabenseifner, Gropp 2005, §4; latency grows with log₂ of the ranks.

All take scalars or arrays of sizes and ranks. Invariant: no cost for one rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.resources.specs import HardwareSpec

Numbers = NDArray[Any] | float


def all_reduce(size: Numbers, ranks: Numbers, hardware: HardwareSpec) -> Numbers:
    """The volume part of an all-reduce of ``size`` bytes among ``ranks`` of one node: 2(r−1)/r · size / NVLink."""
    return 2 * (ranks - 1) / ranks * size / hardware.nvlink


def all_to_all(size: Numbers, ranks: Numbers, hardware: HardwareSpec) -> Numbers:
    """The volume part: each rank holds ``size`` bytes, of which (r−1)/r leave it, within one node."""
    return (ranks - 1) / ranks * size / hardware.nvlink


def latency(ranks: Numbers, hardware: HardwareSpec) -> Numbers:
    """Latency of one collective among ``ranks``."""
    return np.asarray(hardware.overhead.all_reduce_us * 1e-6 * np.log2(ranks))


def gradient_exchange(
    shard: Numbers, replicas: Numbers, ranks_of_a_replica: Numbers, hardware: HardwareSpec
) -> Numbers:
    """Reduce-scatter of gradients and all-gather of weights of ``shard`` bytes a rank, among ``replicas``.

    Within a node over NVLink first, then across nodes: the node's network carries every distinct shard of the node
    once (hierarchical ring). ``ranks_of_a_replica``: neighbouring ranks that hold different shards, in one node.
    """
    size = hardware.gpus_per_node
    per_node = np.maximum(1, np.minimum(replicas, size // np.maximum(1, ranks_of_a_replica)))
    nodes = -(-np.asarray(replicas) // per_node)
    inside = all_reduce(shard, per_node, hardware) + latency(per_node, hardware)
    shards = np.maximum(1, size // per_node)
    across = 2 * (nodes - 1) / nodes * shard * shards / hardware.network + latency(nodes, hardware)
    return np.asarray(inside + across)


def neighbour_bandwidth(stage: Numbers, stages: Numbers, hardware: HardwareSpec) -> Numbers:
    """Bytes/s from one pipeline stage of ``stage`` devices to the next of ``stages``: NVLink while the whole pipeline
    is in a node, else the share of the network that a device has."""
    inside = np.asarray(stage) * stages <= hardware.gpus_per_node
    return np.where(inside, hardware.nvlink, hardware.network / hardware.gpus_per_node)
