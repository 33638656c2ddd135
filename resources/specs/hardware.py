"""What one kind of accelerator offers.

Invariants: all figures are of one device and one direction, in the units that the keys name; the properties give SI
units (bytes, bytes/s, FLOP/s, seconds). Shares and overheads are assumptions until a profile replaces them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from libra.resources.config import Config
from libra.resources.specs import files

GIB = 2**30


class Efficiency(Config):
    """Shares of the peaks that are reached, in (0, 1]."""

    hbm: float = Field(gt=0, le=1)
    compute_prefill: float = Field(gt=0, le=1)
    compute_train: float = Field(gt=0, le=1)
    nvlink: float = Field(gt=0, le=1)
    network: float = Field(gt=0, le=1)


class Overhead(Config):
    """Costs that do not shrink with the device's speed."""

    step_ms: float = Field(ge=0)
    """Host time of one decode step."""
    sequence_us: float = Field(ge=0)
    """Host time of one sequence in one decode step."""
    prefill_ms: float = Field(ge=0)
    """Host time of one admission."""
    all_reduce_us: float = Field(ge=0)
    """Latency of one all-reduce between two devices; grows with log2 of their number."""
    micro_batch_ms: float = Field(ge=0)
    """Host time of one micro-batch on one pipeline stage, forward or backward."""


class HardwareSpec(Config):
    """One kind of device; see conf/hardware."""

    name: str
    kind: Literal["compute", "bandwidth", "balanced", "cpu"]
    """What it is rich in, for choosing where prefill-heavy and decode-heavy work runs."""
    bf16_tflops: float = Field(gt=0)
    memory_mib: float = Field(gt=0)
    hbm_gb_per_s: float = Field(gt=0)
    nvlink_gb_per_s_per_direction: float = Field(gt=0)
    pcie_gb_per_s: float = Field(gt=0)
    host_copy_gb_per_s: float = Field(gt=0)
    """Rate at which staged KV reaches the device through host memory."""
    network_gbit_per_s_per_node: float = Field(gt=0)
    gpus_per_node: int = Field(ge=1)
    efficiency: Efficiency
    overhead: Overhead
    workspace_gib: float = Field(ge=0)
    memory_share: float = Field(gt=0, le=1)

    @property
    def flops(self) -> float:
        """Peak FLOP/s, bf16 dense."""
        return self.bf16_tflops * 1e12

    @property
    def memory(self) -> float:
        """Bytes of device memory."""
        return self.memory_mib * 2**20

    @property
    def workspace(self) -> float:
        """Bytes that neither weights nor KV may use."""
        return self.workspace_gib * GIB

    @property
    def hbm(self) -> float:
        """Reached memory bandwidth, bytes/s."""
        return self.hbm_gb_per_s * 1e9 * self.efficiency.hbm

    @property
    def nvlink(self) -> float:
        """Reached bandwidth between devices of a node, bytes/s and direction."""
        return self.nvlink_gb_per_s_per_direction * 1e9 * self.efficiency.nvlink

    @property
    def network(self) -> float:
        """Reached bandwidth of one node's network, bytes/s: gigabits / 8, so 200 Gb/s is 25 GB/s at most."""
        return self.network_gbit_per_s_per_node * 1e9 / 8 * self.efficiency.network


def load_hardware(name: str | Path) -> HardwareSpec:
    """A shipped hardware spec by name, or one from a YAML file. Raises `ConfigError`."""
    source, data = files.read(name, "hardware", "hardware spec")
    return files.parse(HardwareSpec, data, source)
