"""What devices there are: from NVML, or from a cluster written by hand.

Invariants: a device has one id, unique in the inventory; devices of one NVLink domain share a node; a device that is
split by MIG is refused, since an engine or rank could not be given a whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from libra.resources.errors import ClusterError, ConfigError
from libra.resources.specs import ClusterSpec, HardwareSpec, load_cluster, load_hardware


@dataclass(frozen=True, slots=True)
class Device:
    """``id``: ``node:index``. ``hardware``: name of its spec. ``domain``: devices of equal domain talk over NVLink."""

    id: str
    node: str
    index: int
    hardware: str
    memory_bytes: int
    domain: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """All devices, in node order, and the specs that they name."""

    devices: tuple[Device, ...]
    hardware: tuple[HardwareSpec, ...]

    def __post_init__(self) -> None:
        ids = [device.id for device in self.devices]
        if len(set(ids)) != len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise ConfigError(
                f"devices named twice in the inventory: {', '.join(twice)}; every device needs its own id"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the hardware, in order of appearance."""
        return tuple(dict.fromkeys(device.hardware for device in self.devices))

    def spec(self, kind: str) -> HardwareSpec:
        """The hardware spec named ``kind``; `ConfigError` names those there are."""
        for each in self.hardware:
            if each.name == kind:
                return each
        raise ConfigError(f"the inventory has no hardware {kind!r}, only {', '.join(self.kinds)}")

    def of(self, kind: str) -> tuple[Device, ...]:
        """The devices of one kind."""
        return tuple(device for device in self.devices if device.hardware == kind)

    def __len__(self) -> int:
        return len(self.devices)


def from_cluster(cluster: ClusterSpec | str | Path) -> Inventory:
    """The inventory of a cluster written by hand (a spec, a shipped name or a path). Raises `ConfigError`."""
    spec = cluster if isinstance(cluster, ClusterSpec) else load_cluster(cluster)
    devices: list[Device] = []
    hardware: dict[str, HardwareSpec] = {}
    node = 0
    for group in spec.groups:
        base = load_hardware(group.hardware)
        gbit = group.network_gbit_per_s_per_node or base.network_gbit_per_s_per_node
        per_node = group.gpus_per_node or base.gpus_per_node
        kind = base.model_copy(update={"network_gbit_per_s_per_node": gbit, "gpus_per_node": per_node})
        if hardware.setdefault(kind.name, kind) != kind:
            raise ConfigError(
                f"cluster {spec.name}: groups of {kind.name} differ in gpus_per_node or network; give the second kind "
                "a hardware file with its own name"
            )
        for _ in range(group.nodes):
            devices += [
                Device(f"n{node}:{i}", f"n{node}", i, kind.name, int(kind.memory), f"n{node}") for i in range(per_node)
            ]
            node += 1
    return Inventory(tuple(devices), tuple(hardware.values()))


def uniform(hardware: HardwareSpec, gpus: int) -> Inventory:
    """``gpus`` devices of one kind on as few nodes as they fit; the last node may be partly filled."""
    if gpus < 1:
        raise ConfigError(f"an inventory needs at least one device, got {gpus}")
    per = hardware.gpus_per_node
    devices = tuple(
        Device(f"n{i // per}:{i % per}", f"n{i // per}", i % per, hardware.name, int(hardware.memory), f"n{i // per}")
        for i in range(gpus)
    )
    return Inventory(devices, (hardware,))


def from_nvml(node: str = "localhost", specs: Sequence[HardwareSpec] = (), nvml: Any = None) -> Inventory:
    """The GPUs of this machine, as NVML sees them.

    ``specs``: hardware specs tried in order by their names in the device's name (none: the shipped ones); NVML's
    memory replaces the spec's. ``nvml``: the module ``pynvml`` or one with its functions (None: ``pynvml``).
    Raises `ClusterError` when there is no driver, no device, an unknown device, or a device in MIG mode.
    """
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ClusterError(
            f"NVML cannot be used on {node}: {error}. Without an NVIDIA driver, describe the machine by hand "
            "(conf/cluster), for instance the shipped cluster 'cpu'"
        ) from None
    try:
        return _read_nvml(node, specs or _shipped_specs(), nvml)
    finally:
        nvml.nvmlShutdown()


def _shipped_specs() -> tuple[HardwareSpec, ...]:
    # Longest names first: "h100" must not claim an "h1000".
    return tuple(load_hardware(name) for name in ("a800_80g", "a100_80g", "h100", "h200", "h800", "h20"))


def _read_nvml(node: str, specs: Iterable[HardwareSpec], nvml: Any) -> Inventory:
    specs = tuple(specs)
    count = nvml.nvmlDeviceGetCount()
    if not count:
        raise ClusterError(f"NVML finds no GPU on {node}; describe the machine by hand (conf/cluster)")
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    devices: list[Device] = []
    hardware: dict[str, HardwareSpec] = {}
    domains = nvlink_domains(handles, nvml)
    for index, handle in enumerate(handles):
        name = nvml_text(nvml.nvmlDeviceGetName(handle))
        refuse_mig(handle, index, node, nvml)
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        spec = _match(name, specs, node, index)
        spec = spec.model_copy(update={"memory_mib": memory / 2**20, "gpus_per_node": count})
        spec = hardware.setdefault(spec.name, spec)
        devices.append(Device(f"{node}:{index}", node, index, spec.name, memory, f"{node}/{domains[index]}"))
    smallest = {kind: min(d.memory_bytes for d in devices if d.hardware == kind) for kind in hardware}
    fitted = tuple(replace_memory(spec, smallest[kind]) for kind, spec in hardware.items())
    return Inventory(tuple(devices), fitted)


def replace_memory(spec: HardwareSpec, memory_bytes: int) -> HardwareSpec:
    """The spec with another device memory."""
    return spec.model_copy(update={"memory_mib": memory_bytes / 2**20})


def refuse_mig(handle: Any, index: int, node: str, nvml: Any) -> None:
    """`ClusterError` if the GPU is in MIG mode."""
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return  # the device has no MIG
    if current:
        name = nvml_text(nvml.nvmlDeviceGetName(handle))
        raise ClusterError(
            f"GPU {index} of {node} ({name}) is in MIG mode: engines and ranks need whole GPUs. Disable MIG on it "
            "(nvidia-smi -mig 0) or leave it out with CUDA_VISIBLE_DEVICES and a cluster written by hand"
        )


def nvlink_domains(handles: list[Any], nvml: Any) -> list[int]:
    """A domain number a device: those that NVLink joins share one; without NVLink each is alone."""
    domain = list(range(len(handles)))
    for i in range(len(handles)):
        for j in range(i + 1, len(handles)):
            try:
                status = nvml.nvmlDeviceGetP2PStatus(handles[i], handles[j], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            except nvml.NVMLError:
                continue
            if status == nvml.NVML_P2P_STATUS_OK:
                old, new = domain[j], domain[i]
                domain = [new if d == old else d for d in domain]
    return domain


def _match(name: str, specs: tuple[HardwareSpec, ...], node: str, index: int) -> HardwareSpec:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    for spec in specs:
        if spec.name.split("_")[0] in words:
            return spec
    raise ClusterError(
        f"GPU {index} of {node} is a {name!r}, for which there is no hardware spec "
        f"({', '.join(s.name for s in specs)}); write one (see conf/hardware) and pass it"
    )


def nvml_text(value: str | bytes) -> str:
    """A name as NVML gives it, which is bytes in older versions."""
    return value.decode() if isinstance(value, bytes) else value


def without(inventory: Inventory, ids: Iterable[str]) -> Inventory:
    """The inventory less the devices named; `ConfigError` if one is not there."""
    gone = set(ids)
    if missing := gone - {d.id for d in inventory.devices}:
        raise ConfigError(f"the inventory has no device {', '.join(sorted(missing))}")
    return replace(inventory, devices=tuple(d for d in inventory.devices if d.id not in gone))
