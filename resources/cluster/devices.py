"""Which GPUs of this machine each worker of a local cluster gets.

Invariants: no GPU is given twice; a worker's GPUs lie in one NVLink domain; what the launcher itself may not see
(``CUDA_VISIBLE_DEVICES``) is given to nobody; a machine without an NVIDIA driver has no GPUs, which is no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import Any

from libra.resources.errors import ClusterError
from libra.resources.inventory import nvlink_domains, nvml_text, refuse_mig

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
"""CUDA counts GPUs by speed unless told to count as NVML does."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by NVML's ``index`` and ``uuid``; those of equal ``domain`` talk over NVLink."""

    index: int
    uuid: str
    domain: int


def gpus_here(environment: Mapping[str, str], nvml: Any = None) -> tuple[Gpu, ...]:
    """The GPUs that this process may use, given its ``environment``. ``nvml``: the module ``pynvml`` or one with its
    functions. `ClusterError` for one in MIG mode."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        domains = nvlink_domains(handles, nvml)
        uuids = [nvml_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        found = [Gpu(index, uuid, domains[index]) for index, uuid in enumerate(uuids)]
        visible = [gpu for gpu in found if _visible(gpu, environment.get(VISIBLE))]
        for gpu in visible:
            refuse_mig(handles[gpu.index], gpu.index, "this machine", nvml)
        return tuple(visible)
    finally:
        nvml.nvmlShutdown()


def deal(wanted: Mapping[str, int], gpus: Sequence[Gpu]) -> dict[str, tuple[Gpu, ...]]:
    """GPUs for each worker of ``wanted`` (how many, by name): those that want most first, each from the domain that
    then has the least left over. `ClusterError` if they do not suffice."""
    free: dict[int, list[Gpu]] = {}
    for gpu in gpus:
        free.setdefault(gpu.domain, []).append(gpu)
    dealt: dict[str, tuple[Gpu, ...]] = {}
    for name, count in sorted(wanted.items(), key=lambda item: (-item[1], item[0])):
        fitting = [domain for domain in free.values() if len(domain) >= count]
        if not fitting:
            sizes = ", ".join(str(sum(gpu.domain == domain for gpu in gpus)) for domain in free)
            raise ClusterError(
                f"{name} wants {count} GPU(s) that NVLink joins, and after {', '.join(dealt) or 'nobody'} there are "
                f"not as many left: this process sees {len(gpus)} GPU(s) ({VISIBLE}), in NVLink domains of {sizes}. "
                "Lower buckets.*.tp or buckets.*.instances, or use a cluster with more (cluster.scheduler)"
            )
        domain = min(fitting, key=len)
        dealt[name] = tuple(domain[:count])
        del domain[:count]
    return dealt


def environment_of(gpus: Sequence[Gpu]) -> dict[str, str]:
    """The variables that show a process these GPUs alone."""
    return {VISIBLE: ",".join(str(gpu.index) for gpu in gpus), ORDER: "PCI_BUS_ID"}


def _named(value: str) -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` names: CUDA stops at the first entry that is neither an index nor a UUID."""
    names = [name.strip() for name in value.split(",")]
    return list(takewhile(lambda name: name.isdigit() or name.startswith("GPU-"), names))


def _visible(gpu: Gpu, value: str | None) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES`` names the GPU, by index or by the beginning of its UUID."""
    if value is None:
        return True
    named = _named(value)
    by_uuid = any(name.startswith("GPU-") and gpu.uuid.startswith(name) for name in named)
    return by_uuid or str(gpu.index) in named
