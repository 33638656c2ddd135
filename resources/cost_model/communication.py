"""Seconds of collectives. Ring volumes: Thakur, Rabenseifner, Gropp 2005, §4; latency grows with log₂ of the ranks.

Invariant: no cost for one rank.
"""

from __future__ import annotations

from math import ceil, log2

from libra.resources.specs import HardwareSpec


def all_reduce(size: float, ranks: int, hardware: HardwareSpec) -> float:
    """An all-reduce of ``size`` bytes among ``ranks`` of one node: 2(r−1)/r · size / NVLink + latency."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * size / hardware.nvlink + latency(ranks, hardware)


def all_to_all(size: float, ranks: int, hardware: HardwareSpec) -> float:
    """Each rank holds ``size`` bytes, of which (r−1)/r leave it, within one node."""
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * size / hardware.nvlink + latency(ranks, hardware)


def latency(ranks: int, hardware: HardwareSpec) -> float:
    """Latency of one collective among ``ranks``."""
    return hardware.overhead.all_reduce_us * 1e-6 * log2(ranks) if ranks > 1 else 0.0


def gradient_exchange(shard: float, replicas: int, ranks_of_a_replica: int, hardware: HardwareSpec) -> float:
    """Reduce-scatter of gradients and all-gather of weights of ``shard`` bytes a rank, among ``replicas``.

    Within a node over NVLink first, then across nodes: the node's network carries every distinct shard of the node
    once (hierarchical ring). ``ranks_of_a_replica``: neighbouring ranks that hold different shards, in one node.
    """
    if replicas == 1:
        return 0.0
    per_node = max(1, min(replicas, hardware.gpus_per_node // max(1, ranks_of_a_replica)))
    nodes = ceil(replicas / per_node)
    inside = all_reduce(shard, per_node, hardware)
    if nodes == 1:
        return inside
    shards = max(1, hardware.gpus_per_node // per_node)
    return inside + 2 * (nodes - 1) / nodes * shard * shards / hardware.network + latency(nodes, hardware)


def neighbour_bandwidth(tp_times_ep: int, pp: int, hardware: HardwareSpec) -> float:
    """Bytes/s from one pipeline stage to the next: NVLink while the whole pipeline is in a node, else the share of the
    network that the stage's ranks have."""
    if tp_times_ep * pp <= hardware.gpus_per_node:
        return hardware.nvlink
    return hardware.network / hardware.gpus_per_node
