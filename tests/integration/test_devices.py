"""GPUs dealt out to the workers of a local cluster."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from recorded_nvml import RecordedNVML

from libra.pipeline.config import parse
from libra.pipeline.run import cluster
from libra.resources.cluster.devices import Gpu, deal, environment_of, gpus_here
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.errors import ClusterError

H200 = ("NVIDIA H200", 143771)


def machine(domains: list[int]) -> RecordedNVML:
    return RecordedNVML([(*H200, 0, domain) for domain in domains])


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, [0, 1, 2]), ("1,2", [1, 2]), ("GPU-00000002", [2]), ("", []), ("7", []), ("0,-1,1", [0])],
    ids=["all", "by index", "by UUID", "none", "another machine's", "up to what is none"],
)
def test_only_what_the_launcher_sees_is_dealt_out(visible: str | None, seen: list[int]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.index for gpu in gpus_here(environment, machine([0, 0, 0]))] == seen


def test_a_machine_without_a_driver_has_none_and_mig_is_refused_where_it_is_seen() -> None:
    assert gpus_here({}, RecordedNVML([], driver=False)) == ()
    split = RecordedNVML([(*H200, 1, 0), (*H200, 0, 0)])
    with pytest.raises(ClusterError, match=r"GPU 0 of this machine .* is in MIG mode"):
        gpus_here({}, split)
    assert [gpu.index for gpu in gpus_here({"CUDA_VISIBLE_DEVICES": "1"}, split)] == [1]


def test_the_widest_instance_gets_the_domain_that_fits_best() -> None:
    gpus = gpus_here({}, machine([0, 0, 0, 0, 4, 4]))
    dealt = deal({"rollout-0": 1, "rollout-1": 2, "rollout-2": 2}, gpus)
    assert {name: [gpu.index for gpu in its] for name, its in dealt.items()} == {
        "rollout-1": [4, 5],
        "rollout-2": [0, 1],
        "rollout-0": [2],
    }
    assert environment_of(dealt["rollout-1"]) == {"CUDA_VISIBLE_DEVICES": "4,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_too_few_say_who_wants_how_many_and_what_to_do() -> None:
    with pytest.raises(ClusterError, match=r"rollout-1 wants 1 GPU.*after rollout-0.*sees 2 GPU.*Lower buckets"):
        deal({"rollout-0": 2, "rollout-1": 1}, gpus_here({}, machine([0, 0])))
    with pytest.raises(ClusterError, match=r"wants 2 GPU.*domains of 1, 1"):
        deal({"rollout-0": 2}, gpus_here({}, machine([0, 1])))


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=6))
def test_no_gpu_is_dealt_twice_and_nobody_spans_domains(domains: list[int], degrees: list[int]) -> None:
    gpus = [Gpu(index, f"GPU-{index}", domain) for index, domain in enumerate(domains)]
    try:
        dealt = deal({f"rollout-{number}": tp for number, tp in enumerate(degrees)}, gpus)
    except ClusterError:
        return
    given_out = [gpu.index for its in dealt.values() for gpu in its]
    assert len(given_out) == len(set(given_out)) == sum(degrees)
    for number, tp in enumerate(degrees):
        its = dealt[f"rollout-{number}"]
        assert len(its) == tp
        assert len({gpu.domain for gpu in its}) == 1


@pytest.mark.cluster
def test_a_worker_and_what_it_starts_see_its_gpus_alone() -> None:
    dealt = {"rollout-1": (Gpu(2, "GPU-2", 0), Gpu(3, "GPU-3", 0))}
    with LibraLocalCluster({"rollout": 2}, gpus=dealt, dashboard=False) as own, Client(own) as client:
        seen = client.run(lambda dask_worker: (dask_worker.name, os.environ.get("CUDA_VISIBLE_DEVICES")))
    assert sorted(seen.values()) == [("rollout-0", os.environ.get("CUDA_VISIBLE_DEVICES")), ("rollout-1", "2,3")]


def test_the_instances_of_a_run_get_as_many_as_their_tp_degree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "gpus_here", lambda environment: gpus_here({}, machine([0, 0, 0])))
    buckets = [{"tp": 1, "max_context": 64}, {"tp": 2}]
    engine = {"kind": "vllm", "max_context": 128}
    workers = {"workers": {"rollout": 2}}
    config = {"run_dir": str(tmp_path), "buckets": buckets, "engine": engine, "cluster": workers}

    async def environments() -> dict[str, dict[str, str]]:
        own = cluster.local_cluster(parse(config, "test"), tmp_path / "logs")
        return {name: spec["options"]["environment"] for name, spec in own.worker_spec.items()}

    shown = asyncio.run(environments())
    assert {name: shown[name]["CUDA_VISIBLE_DEVICES"] for name in ("rollout-0", "rollout-1")} == {
        "rollout-0": "2",
        "rollout-1": "0,1",
    }
    assert shown["train-0"] == {}
