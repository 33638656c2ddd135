"""The inventory: by hand, and from NVML's answers (recorded, since a test machine need not have a GPU)."""

from __future__ import annotations

import pytest
from recorded_nvml import RecordedNVML

from libra.resources.errors import ClusterError, ConfigError
from libra.resources.inventory import Device, Inventory, from_cluster, from_nvml, uniform, without
from libra.resources.specs import ClusterSpec, DeviceGroup, load_hardware


def test_nvml_gives_memory_kinds_and_nvlink_domains() -> None:
    nvml = RecordedNVML([("NVIDIA H200", 143771, 0, 0), ("NVIDIA H200", 143771, 0, 0), ("NVIDIA H200", 143771, 0, 1)])
    inventory = from_nvml("gpu7", nvml=nvml)
    assert inventory.kinds == ("h200",)
    assert [d.domain for d in inventory.devices] == ["gpu7/0", "gpu7/0", "gpu7/2"]
    assert inventory.devices[0].memory_bytes == 143771 * 2**20
    assert inventory.spec("h200").gpus_per_node == 3
    assert not nvml.open


def test_a_gpu_without_mig_is_taken() -> None:
    assert len(from_nvml(nvml=RecordedNVML([("NVIDIA A800-SXM4-80GB", 81920, None, 0)]))) == 1


@pytest.mark.parametrize(
    ("nvml", "says"),
    [
        (RecordedNVML([("NVIDIA H100 80GB HBM3", 81559, 1, 0)]), "GPU 0 of .* is in MIG mode"),
        (RecordedNVML([("NVIDIA GeForce RTX 4090", 24564, None, 0)]), "no hardware spec"),
        (RecordedNVML([]), "finds no GPU"),
        (RecordedNVML([], driver=False), "Driver Not Loaded"),
    ],
)
def test_what_cannot_be_used_is_refused(nvml: RecordedNVML, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        from_nvml(nvml=nvml)
    assert not nvml.open


def test_a_cluster_by_hand() -> None:
    inventory = from_cluster("h800_h20")
    assert len(inventory) == 64
    assert inventory.kinds == ("h800", "h20")
    assert len({d.id for d in inventory.devices}) == 64
    assert {d.node for d in inventory.of("h20")} == {"n4", "n5", "n6", "n7"}


def test_a_cluster_file_may_change_node_size_and_network() -> None:
    group = DeviceGroup(hardware="a800_80g", nodes=3, gpus_per_node=4, network_gbit_per_s_per_node=100)
    inventory = from_cluster(ClusterSpec(name="mine", groups=(group,)))
    assert len(inventory) == 12
    assert inventory.spec("a800_80g").network == pytest.approx(12.5e9 * 0.8)


def test_no_device_is_named_twice() -> None:
    device = Device("n0:0", "n0", 0, "cpu", 1, "n0")
    with pytest.raises(ConfigError, match="named twice"):
        Inventory((device, device), (load_hardware("cpu"),))


def test_devices_can_be_taken_out() -> None:
    inventory = uniform(load_hardware("a800_80g"), 12)
    assert [d.node for d in inventory.devices] == ["n0"] * 8 + ["n1"] * 4
    assert len(without(inventory, ["n0:3"])) == 11
    with pytest.raises(ConfigError, match="no device n9:9"):
        without(inventory, ["n9:9"])
