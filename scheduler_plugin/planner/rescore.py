"""Plans priced again by simulation: what the router really does, entry load and queueing included.

The closed form prices each request wholly in its own bucket; a real router starts everyone in the first bucket and
learns where they belong. So the best plans as predicted are run for a few steps in the simulator, with the run's own
kind of router. `best_simulated` is pure and takes a clock; `rescore` runs it in a child process, so that the
scheduler's event loop never waits for it (``python -m`` this module: one JSON line in, one out).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from libra.resources.cost_model import RolloutCosts, StepCost
from libra.resources.cost_model.rollout import QueueModel
from libra.resources.cost_model.training import TrainingFactors
from libra.resources.errors import ClusterError
from libra.resources.inventory import Device, Inventory
from libra.resources.specs import HardwareSpec, ModelSpec
from libra.resources.types import Plan, RequestRecord, ToolState
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.planner.planner import Planner, PlannerConfig, Profiles
from libra.scheduler_plugin.planner.routing import PlanRouting
from libra.scheduler_plugin.policy.base import BucketPolicy
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.simulation.loop import LoopConfig, RunLoop
from libra.scheduler_plugin.simulation.states import Moves
from libra.scheduler_plugin.simulation.traces import Trace, Turn

MOST = 100
"""Plans looked at."""
SECONDS = 5.0
"""Wall time for looking."""
_STEPS = 4
"""Steps simulated; the first is warm-up."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """``plan``: the best as simulated, with its simulated ``seconds`` a step; ``predicted``: those of the plan that the
    closed form preferred, simulated; ``count``: plans simulated."""

    plan: Plan
    seconds: float
    predicted: float
    count: int


def cmlfq_for(planner: Planner) -> BucketPolicy:
    """C-MLFQ with the planner's own cost figures, least loaded where a plan is mixed."""
    hardware = planner.inventory.hardware[0]
    steps = planner.rollout_costs(hardware).steps
    cost = {
        "kv_bytes_per_token": planner.model.kv_bytes_per_token,
        "host_bandwidth": int(hardware.host_copy_gb_per_s * 1e9),
        "network_bandwidth": int(hardware.network),
        "prefill_rate": {s.tp: 1 / s.prefill_token for s in steps if s.prefill_token > 0},
        "decode": {s.tp: (s.step, s.sequence, s.token) for s in steps},
        "kv_tokens": {s.tp: int(s.capacity) for s in steps},
    }
    return PlanRouting(CMlfq({"cost": cost}))


ROUTERS: dict[str, Callable[[Planner], BucketPolicy]] = {
    "cmlfq": cmlfq_for,
    "least_loaded": lambda _: LeastLoaded({}),
}


def traces_of(records: Sequence[RequestRecord]) -> list[Trace]:
    """Traces with the totals of records, for where the turns themselves are not known: turns of equal size, and a tool
    state that tells the size class of what tools return and nothing else."""
    found = []
    for i, record in enumerate(records):
        turns = max(1, record.turns)
        calls = max(1, turns - 1)
        payload = record.tool // calls if turns > 1 else 0
        state = ToolState("tool", min(2, payload // 500), "ok")
        size = max(1, record.generated // turns)
        chain = [Turn(size, state, payload, record.tool_seconds / calls) for _ in range(turns - 1)]
        chain.append(Turn(max(1, record.generated - size * (turns - 1))))
        found.append(Trace(f"p{i // 8}e0m{i % 8}", record.prompt, tuple(chain), record.domain))
    return found


def simulated_seconds(
    planner: Planner, plan: Plan, groups: Sequence[Sequence[Trace]], router: str, alpha: int, offload: bool = True
) -> float:
    """Mean seconds of a step of ``plan`` when batches like ``groups`` come again and again."""
    hardware = planner.inventory.spec(plan.train_kind)
    moves = Moves(float(planner.model.kv_bytes_per_token), hardware.host_copy_gb_per_s * 1e9, hardware.network, offload)

    def group(number: int) -> list[Trace]:
        epoch, which = divmod(number, len(groups))
        return [replace(trace, name=f"p{which}e{epoch}m{member}") for member, trace in enumerate(groups[which])]

    config = LoopConfig(_STEPS, len(groups), max(map(len, groups)), alpha)
    result = RunLoop(config, planner, plan, group, ROUTERS[router](planner), moves).run()
    later = result.steps[1:]
    return sum(step.seconds for step in later) / len(later)


def best_simulated(
    planner: Planner,
    plans: Sequence[Plan],
    groups: Sequence[Sequence[Trace]],
    router: str = "cmlfq",
    alpha: int = 1,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Rescored:
    """The plan that is fastest as simulated, of as many of ``plans`` as fit in ``seconds`` of ``clock`` (at least
    one)."""
    began = clock()
    scores: list[float] = []
    for plan in plans:
        if scores and clock() - began > seconds:
            break
        scores.append(simulated_seconds(planner, plan, groups, router, alpha))
    best = min(range(len(scores)), key=scores.__getitem__)
    return Rescored(plans[best], scores[best], scores[0], len(scores))


def grouped(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Traces by group, in order."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(trace.group, []).append(trace)
    return list(found.values())


def rescore(
    planner: Planner,
    records: Sequence[RequestRecord],
    traces: Sequence[Trace] = (),
    router: str = "cmlfq",
    alpha: int = 1,
    seconds: float = SECONDS,
    old: Plan | None = None,
) -> Rescored:
    """`best_simulated` over the planner's best `MOST` plans, in a child process. ``traces``: what the requests did
    (none: derived from the records). Raises `ClusterError` with the child's own words when it fails."""
    plans = planner.candidates(records, MOST, old)
    message = {
        "model": planner.model.model_dump(mode="json"),
        "hardware": [h.model_dump(mode="json") for h in planner.inventory.hardware],
        "devices": [[d.id, d.node, d.index, d.hardware, d.memory_bytes, d.domain] for d in planner.inventory.devices],
        "config": planner.config.model_dump(mode="json"),
        "costs": {kind: _costs_out(costs) for kind, costs in planner.profiles.rollout.items()},
        "factors": {kind: asdict(factors) for kind, factors in planner.profiles.training.items()},
        "records": [r.to_plain() for r in records],
        "traces": [_trace_out(t) for t in (traces or traces_of(records))],
        "router": router, "alpha": alpha, "seconds": seconds, "count": len(plans),
    }  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-m", __spec__.name], input=json.dumps(message), capture_output=True, text=True,
        timeout=30 + 6 * seconds, check=False,
    )  # fmt: skip
    if child.returncode:
        raise ClusterError(f"the simulation of plans failed in its child process: {child.stderr.strip()[-500:]}")
    answer = json.loads(child.stdout)
    return Rescored(plans[answer["best"]], answer["seconds"], answer["predicted"], answer["count"])


def _costs_out(costs: RolloutCosts) -> dict[str, Any]:
    return {"steps": [asdict(step) for step in costs.steps], "queue": asdict(costs.queue)}


def _costs_in(row: dict[str, Any]) -> RolloutCosts:
    return RolloutCosts(tuple(StepCost(**step) for step in row["steps"]), QueueModel(**row["queue"]), "measured")


def _trace_out(trace: Trace) -> list[Any]:
    turns = [
        [t.generated, None if t.state is None else [t.state.type, t.state.size, t.state.status], t.payload, t.seconds]
        for t in trace.turns
    ]
    return [trace.name, trace.prompt_tokens, turns, trace.domain]


def _child(message: dict[str, Any]) -> dict[str, Any]:
    hardware = tuple(HardwareSpec.model_validate(h) for h in message["hardware"])
    inventory = Inventory(tuple(Device(*d) for d in message["devices"]), hardware)
    config = PlannerConfig.model_validate(message["config"])
    profiles = Profiles(
        {kind: _costs_in(row) for kind, row in message["costs"].items()},
        {kind: TrainingFactors(**row) for kind, row in message["factors"].items()},
    )
    planner = Planner(ModelSpec.model_validate(message["model"]), inventory, config, profiles)
    records = [RequestRecord.from_plain(row) for row in message["records"]]
    plans = planner.candidates(records, message["count"])
    traces = [
        Trace(
            name, tokens, tuple(Turn(g, None if s is None else ToolState(*s), p, sec) for g, s, p, sec in turns), domain
        )
        for name, tokens, turns, domain in message["traces"]
    ]
    found = best_simulated(planner, plans, grouped(traces), message["router"], message["alpha"], message["seconds"])
    best = next(i for i, plan in enumerate(plans) if plan is found.plan)
    return {"best": best, "seconds": found.seconds, "predicted": found.predicted, "count": found.count}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_child(json.loads(sys.stdin.read()))))
