"""Whatever is planned: the plan fits its inventory, names no device twice, and serves every request exactly once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice

from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from workloads import checked_plan, records

from libra.resources.errors import ConfigError
from libra.resources.inventory import from_cluster, uniform
from libra.resources.specs import ClusterSpec, DeviceGroup, load_hardware, load_model
from libra.resources.types import RolloutLayout
from libra.scheduler_plugin.planner import Planner, PlannerConfig

MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B")
HARDWARE = ("a800_80g", "h20", "h100", "h200")
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking: a plan and its candidates take a tenth of a second."""
WORKLOADS = st.builds(
    records, st.integers(1, 120), seed=st.integers(0, 10_000), mean=st.floats(600, 15_000), tools=st.booleans()
)


@given(
    st.sampled_from(MODELS), st.sampled_from(HARDWARE), st.integers(2, 40), WORKLOADS, st.integers(1, 4),
    st.sampled_from(["any", "homogeneous"]),
)  # fmt: skip
# Several requests of the longest context, on both sides of a bucket's bound.
@example("Qwen3-30B-A3B", "h20", 35, records(104, seed=7140, mean=11061.465461537546, tools=False), 4, "homogeneous")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=QUICK)
def test_a_plan_fits_names_no_device_twice_and_serves_each_request_once(
    model: str, hardware: str, gpus: int, work: list, overlap: int, layouts: str
) -> None:
    config = PlannerConfig.model_validate({"overlap": overlap, "layouts": layouts})
    planner = Planner(load_model(model), uniform(load_hardware(hardware), gpus), config)
    try:
        plan = planner.plan(work)
    except ConfigError:
        assume(False)  # too few devices: what is said then is tested elsewhere
    checked_plan(plan, planner)
    served_once(plan.layout, sorted(r.context for r in work))
    for other in planner.candidates(work, 5):
        checked_plan(other, planner)
        served_once(other.layout, sorted(r.context for r in work))


def served_once(layout: RolloutLayout, contexts: list[int]) -> None:
    """Every request is on one instance, and in a partition every bucket's instances have the requests of its interval:
    those above the bound of the bucket below, up to its own (equal contexts may lie on both sides of a bound)."""
    assert sum(instance.requests for instance in layout.instances) == len(contexts)
    assert sum(bucket.instances for bucket in layout.buckets) == len(layout.instances)
    assert layout.buckets[-1].max_context is None
    if layout.kind != "partition":
        return
    instances, served = iter(layout.instances), 0
    for bucket in layout.buckets:
        mine = list(islice(instances, bucket.instances))
        assert {instance.tp for instance in mine} == {bucket.tp}
        served += sum(instance.requests for instance in mine)
        if bucket.max_context is not None:
            assert bisect_left(contexts, bucket.max_context) <= served <= bisect_right(contexts, bucket.max_context)
            assert max(instance.last_context for instance in mine) <= bucket.max_context


@given(st.integers(1, 3), st.integers(1, 3), WORKLOADS, st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=QUICK)
def test_plans_on_two_kinds_fit_too(first: int, second: int, work: list, split: bool) -> None:
    groups = (DeviceGroup(hardware="h800", nodes=first), DeviceGroup(hardware="h20", nodes=second))
    planner = Planner(
        load_model("Qwen3-8B"), from_cluster(ClusterSpec(name="two", groups=groups)), PlannerConfig(split_prefill=split)
    )
    checked_plan(planner.plan(work), planner)
