"""Specs of hardware, models and clusters: what conf/hardware, conf/models and conf/cluster hold, as typed values.

Invariants: a spec's keys carry their units; every derived figure (parameters, KV bytes a token) follows from the
architecture and is not typed in a second time.
"""

from libra.resources.specs.cluster import ClusterSpec, DeviceGroup, load_cluster
from libra.resources.specs.hardware import HardwareSpec, load_hardware
from libra.resources.specs.hf import load_model, model_from_hf
from libra.resources.specs.model import ModelSpec

__all__ = [
    "ClusterSpec",
    "DeviceGroup",
    "HardwareSpec",
    "ModelSpec",
    "load_cluster",
    "load_hardware",
    "load_model",
    "model_from_hf",
]
