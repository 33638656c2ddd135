"""Plans as a whole: they fit the inventory, name no device twice, explain themselves, and fail clearly."""

from __future__ import annotations

import json

import pytest
from workloads import checked_plan, records

from libra.resources.errors import ConfigError
from libra.resources.inventory import from_cluster, uniform
from libra.resources.specs import ClusterSpec, DeviceGroup, load_hardware, load_model
from libra.resources.types import RequestRecord
from libra.scheduler_plugin.planner import Planner, PlannerConfig

A800 = load_hardware("a800_80g")
WORKLOAD = records(300, seed=5)


@pytest.mark.parametrize("gpus", [16, 48, 61])
def test_a_plan_fits_its_inventory(gpus: int) -> None:
    planner = Planner(load_model("Qwen3-14B"), uniform(A800, gpus))
    plan = planner.plan(WORKLOAD)
    checked_plan(plan, planner)
    assert plan.seconds == max(plan.train_seconds, plan.rollout_seconds)
    assert plan.alternatives
    assert all(a.seconds >= plan.seconds * (1 - 1e-9) for a in plan.alternatives)
    assert json.loads(json.dumps(plan.to_plain()))["seconds"] == plan.seconds


def test_buckets_are_runs_of_one_degree_and_the_last_is_unbounded() -> None:
    plan = Planner(load_model("Qwen3-14B"), uniform(A800, 64)).plan(WORKLOAD)
    buckets = plan.layout.buckets
    assert buckets[-1].max_context is None
    if plan.layout.kind == "partition":
        degrees = [b.tp for b in buckets]
        assert degrees == sorted(set(degrees), key=degrees.index)
        bounds = [b.max_context for b in buckets[:-1]]
        assert bounds == sorted(bounds)  # type: ignore[type-var]
    assert sum(b.instances for b in buckets) == len(plan.layout.instances)


def test_a_plan_can_be_priced_for_other_records() -> None:
    planner = Planner(load_model("Qwen3-14B"), uniform(A800, 48))
    plan = planner.plan(WORKLOAD)
    train, rollout = planner.evaluate(plan, WORKLOAD)
    assert train == pytest.approx(plan.train_seconds)
    assert rollout <= plan.rollout_seconds * 1.1  # mixing within buckets instead of intervals within them
    longer = records(300, seed=5, mean=20_000)
    assert planner.evaluate(plan, longer)[1] > rollout
    assert max(planner.evaluate(plan, longer)) >= planner.plan(longer).seconds * (1 - 1e-6)


def test_drifted_work_moves_devices_but_no_more_than_needed() -> None:
    planner = Planner(load_model("Qwen3-14B"), uniform(A800, 48))
    first = planner.plan(records(300, seed=1, mean=2500))
    second = planner.plan(records(300, seed=1, mean=14_000), old=first)
    roles = {d: p.role for p in first.placements for d in p.devices}
    changed = sum(roles.get(d, p.role) != p.role for p in second.placements for d in p.devices)
    assert changed <= abs(second.strategy.gpus - first.strategy.gpus) + A800.gpus_per_node


def test_two_kinds_serve_different_classes() -> None:
    inventory = from_cluster(
        ClusterSpec(name="two", groups=(DeviceGroup(hardware="h800", nodes=2), DeviceGroup(hardware="h20", nodes=2)))
    )
    planner = Planner(load_model("Qwen3-8B"), inventory)
    plan = planner.plan(prefill_and_decode_heavy())
    checked_plan(plan, planner)
    assert {part.kind for part in plan.rollout} <= {"h800", "h20"}
    assert plan.train_kind == "h800"  # compute-rich
    served = [name for part in plan.rollout for name in part.classes]
    assert len(served) == len(set(served)) == 3
    by_kind = {part.kind: part.classes for part in plan.rollout}
    assert "decode" in by_kind["h20"]  # bandwidth-rich


def test_prefill_may_be_split_from_decode() -> None:
    inventory = from_cluster(
        ClusterSpec(name="two", groups=(DeviceGroup(hardware="h800", nodes=2), DeviceGroup(hardware="h20", nodes=2)))
    )
    work = prefill_and_decode_heavy()
    whole = Planner(load_model("Qwen3-8B"), inventory).plan(work)
    split = Planner(load_model("Qwen3-8B"), inventory, PlannerConfig(split_prefill=True)).plan(work)
    checked_plan(split, Planner(load_model("Qwen3-8B"), inventory))
    assert split.seconds <= whole.seconds * (1 + 1e-9)


def prefill_and_decode_heavy() -> list[RequestRecord]:
    found = []
    for i in range(60):
        found.append(RequestRecord.from_turns(f"g0m{i}", 200, [(6000 + 10 * i, 0, 0.0)], domain="decode"))
        found.append(RequestRecord.from_turns(f"g1m{i}", 24_000, [(200, 0, 0.0)], domain="prefill"))
        found.append(RequestRecord.from_turns(f"g2m{i}", 4000, [(1500, 2000, 1.0), (500, 0, 0.0)], domain="both"))
    return found


@pytest.mark.parametrize(
    ("planner", "work", "says"),
    [
        (Planner(load_model("Qwen3-14B"), uniform(A800, 1)), WORKLOAD, "at least two devices"),
        (Planner(load_model("Qwen3-14B"), uniform(A800, 8)), [], "no request records"),
        (Planner(load_model("Qwen3-32B"), uniform(A800, 3)), WORKLOAD, "GiB a device"),
        (
            Planner(load_model("Qwen3-0.6B"), uniform(A800, 8), PlannerConfig(degrees=(1,))),
            [RequestRecord.from_turns("g0m0", 10, [(10**7, 0, 0.0)])],
            "the longest request has 10000010 tokens",
        ),
    ],
)
def test_what_cannot_be_planned_says_why(planner: Planner, work: list[RequestRecord], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planner.plan(work)
