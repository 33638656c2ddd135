"""The policies compared, each a way to split, lay out, route and change.

    colocated       both sides take turns on all devices, one TP degree, least loaded, on-policy
    static_uniform  half of the devices each, one TP degree, least loaded
    greedy          as static_uniform, then a node moves to the slower side whenever it is slower by 15 %
    static_optimal  planned for the first workload with one TP degree, least loaded
    homogeneous     static_uniform, and KV offloaded to host memory
    planner         + planned for the first workload (one TP degree)
    heterogeneous   + any layout
    cmlfq           + routed by C-MLFQ
    elastic         + replanned as the workload drifts
    oracle          planned for each coming batch without switching costs, routed by true lengths

``oracle`` is no policy. It bounds the accuracy of routing, not the throughput: its plans are the closed form's choice,
and the instances that true lengths name are not always those that end the batch soonest.

Invariant: all run the same simulator on the same traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from libra.pipeline.simulate.scenario import Scenario, VariantName
from libra.pipeline.simulate.workload import Workload
from libra.resources.calibration import load_profile
from libra.resources.errors import ConfigError
from libra.resources.inventory import from_cluster
from libra.resources.specs import load_model
from libra.resources.types import Plan, RequestRecord
from libra.scheduler_plugin.planner import PLANNED, Planner, PlannerConfig
from libra.scheduler_plugin.planner.planner import Profiles
from libra.scheduler_plugin.planner.rescore import best_simulated, cmlfq_for, grouped
from libra.scheduler_plugin.planner.routing import PlanRouting
from libra.scheduler_plugin.planner.steering import InProcess, Steering
from libra.scheduler_plugin.policy.base import BucketPolicy
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.policy.oracle import Oracle
from libra.scheduler_plugin.simulation import LoopConfig, LoopResult, Moves, RunLoop, StepReport
from libra.tasks.registry import launches_of


@dataclass(frozen=True, slots=True)
class Compared:
    """One variant over the seeds: ``throughput`` in tokens of trained contexts a second and device, mean and standard
    deviation (0 for one seed), and the single results."""

    variant: VariantName
    results: tuple[LoopResult, ...]

    @property
    def throughput(self) -> float:
        """Mean over seeds."""
        return mean(r.throughput for r in self.results)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds."""
        return stdev(r.throughput for r in self.results) if len(self.results) > 1 else 0.0

    @property
    def step_seconds(self) -> float:
        """Mean over seeds and steps, the first step left out."""
        return mean(s.seconds for r in self.results for s in (r.steps[1:] or r.steps))


def planner_of(scenario: Scenario, layouts: str = "any", overlap: int | None = None) -> Planner:
    """The planner of a scenario, as a run would have it; ``overlap``: None for the staleness bound + 1."""
    model = load_model(scenario.model)
    profiles = Profiles()
    if scenario.profile is not None:
        profile = load_profile(scenario.profile)
        if not profile.rollout:
            raise ConfigError(f"profile {profile.name} holds no rollout costs; the scenario {scenario.name} needs some")
        profiles = Profiles.of(profile)
    config = PlannerConfig.model_validate(
        {
            "trainer": scenario.trainer,
            "launches": None if scenario.trainer in PLANNED else launches_of(scenario.trainer),
            "slots": scenario.slots,
            "layouts": layouts,
            "overlap": scenario.alpha + 1 if overlap is None else overlap,
        }
    )
    return Planner(model, from_cluster(scenario.cluster), config, profiles)


def moves_of(planner: Planner, offload: bool) -> Moves:
    """What KV movement costs on the planner's hardware."""
    hardware = planner.inventory.hardware[0]
    kv = float(planner.model.kv_bytes_per_token)
    return Moves(kv, hardware.host_copy_gb_per_s * 1e9, hardware.network, offload)


def simulate(scenario: Scenario, variant: VariantName, seed: int) -> LoopResult:
    """One variant on one seed."""
    homogeneous = variant in ("static_optimal", "planner")
    overlap = 1 if variant == "colocated" else None
    planner = planner_of(scenario, "homogeneous" if homogeneous else "any", overlap)
    workload = Workload(scenario.workload, seed, scenario.steps, scenario.groups, scenario.members + scenario.redundant)
    first = [trace.record() for trace in workload.batch(0)]
    plan = _first_plan(scenario, variant, planner, workload, first)
    colocated = variant == "colocated"
    config = LoopConfig(
        scenario.steps, scenario.groups, scenario.members, 0 if colocated else scenario.alpha,
        min_usable=scenario.min_usable, colocated=colocated, switch_seconds=scenario.switch_seconds,
        activation_seconds=scenario.activation_seconds, join_seconds=scenario.join_seconds,
        stop_seconds=scenario.stop_seconds, install_seconds=scenario.install_seconds, failure=scenario.failure,
        retries=scenario.retries, clairvoyant=variant == "oracle", seed=seed,
    )  # fmt: skip
    offload = variant not in ("colocated", "static_uniform", "greedy", "static_optimal")
    loop = RunLoop(
        config, planner, plan, workload.group, _policy(variant, planner, workload), moves_of(planner, offload),
        _steering(scenario, planner, plan) if variant == "elastic" else None,
        _greedy(scenario, planner) if variant == "greedy" else None,
    )  # fmt: skip
    return loop.run()


def compare(scenario: Scenario, progress: Callable[[str], None] = lambda _: None) -> list[Compared]:
    """Every variant on every seed."""
    found = []
    for variant in scenario.variants:
        results = []
        for seed in scenario.seeds:
            progress(f"{variant}, seed {seed}")
            results.append(simulate(scenario, variant, seed))
        found.append(Compared(variant, tuple(results)))
    return found


def _first_plan(
    scenario: Scenario, variant: VariantName, planner: Planner, workload: Workload, first: Sequence[RequestRecord]
) -> Plan:
    if variant == "colocated":
        return planner.colocated(first)
    if variant in ("static_uniform", "greedy", "homogeneous"):
        return planner.fixed(first, len(planner.inventory) // 2, scenario.uniform_tp)
    if variant == "oracle" or not scenario.rescore:
        return planner.plan(first)
    router = "cmlfq" if variant in ("cmlfq", "elastic") else "least_loaded"
    plans = planner.candidates(first, scenario.rescore)
    groups = grouped(workload.batch(0))
    return best_simulated(planner, plans, groups, router, scenario.alpha, float("inf")).plan


def _steering(scenario: Scenario, planner: Planner, plan: Plan) -> InProcess:
    """Replanning as the plugin does it; plans are simulated here, as many as the scenario says."""
    most = max(1, scenario.rescore)
    steering = Steering(planner, scenario.replan, plan, {"kind": "cmlfq"}, most=most, last=scenario.steps)
    return InProcess(steering, scenario.rescore > 0)


def _policy(variant: VariantName, planner: Planner, workload: Workload) -> BucketPolicy:
    if variant in ("cmlfq", "elastic"):
        return cmlfq_for(planner)
    if variant == "oracle":
        total = workload.steps + 2
        finals = {trace.name: trace.final for step in range(total) for trace in workload.batch(step)}
        return PlanRouting(Oracle({"final": finals}))
    return LeastLoaded({})


def _greedy(scenario: Scenario, planner: Planner) -> Callable[[Plan, StepReport, Sequence[RequestRecord]], Plan | None]:
    node = planner.inventory.hardware[0].gpus_per_node

    def reshape(plan: Plan, report: StepReport, records: Sequence[RequestRecord]) -> Plan | None:
        waited = report.idle_seconds / report.seconds if report.seconds else 0.0
        # Training waits for rollout: rollout is slower. No wait at all: training is.
        change = -node if waited > 0.15 else node if waited < 0.01 else 0
        gpus = plan.strategy.gpus + change
        if not change or not node <= gpus <= len(planner.inventory) - node:
            return None
        try:
            return planner.fixed(records, gpus, scenario.uniform_tp, plan)
        except ConfigError:
            return None

    return reshape


def with_seeds(scenario: Scenario, count: int) -> Scenario:
    """The scenario with the seeds 0 … count − 1."""
    return scenario.model_copy(update={"seeds": tuple(range(count))})
