"""Plans priced again by simulation: what the router really does, entry load and queueing included.

The closed form prices each request wholly in its own bucket; a real router starts everyone in the first bucket and
learns where they belong. So the best plans as predicted are run for a few steps in the simulator, with the run's own
kind of router. Pure: `best_simulated` takes a clock; `libra.scheduler_plugin.planner.rescoring` does the same in a
child process under a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from libra.resources.errors import ConfigError
from libra.resources.types import Plan, RequestRecord, ToolState
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.planner.planner import Planner
from libra.scheduler_plugin.planner.rollout_only import rollout_plans
from libra.scheduler_plugin.planner.routing import PlanRouting
from libra.scheduler_plugin.policy import load_policy
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
    closed form preferred, simulated; ``count``: plans simulated, of ``offered``; ``current``: simulated seconds of the
    plan in force, where there is one."""

    plan: Plan
    seconds: float
    predicted: float
    count: int
    offered: int = 0
    current: float | None = None


@dataclass(frozen=True)
class Job:
    """What to simulate: the planner's best plans for ``records``, or where ``fixed`` those that keep the training side
    of ``current``. ``traces``: what the requests did (none: derived from the records). ``router``: kind of the bucket
    policy, with its ``options``. ``most``: plans at most."""

    planner: Planner
    records: Sequence[RequestRecord]
    traces: Sequence[Trace] = ()
    current: Plan | None = None
    fixed: bool = False
    router: str = "cmlfq"
    options: Mapping[str, Any] = field(default_factory=dict)
    alpha: int = 1
    most: int = MOST

    def __post_init__(self) -> None:
        """Raises `ConfigError` for an inventory of several kinds."""
        if len(self.planner.inventory.kinds) > 1:
            kinds = ", ".join(self.planner.inventory.kinds)
            raise ConfigError(
                f"plans are simulated on one kind of hardware, the inventory has {kinds}; "
                "turn the simulation off (libra plan --simulate 0, planner.rescore_seconds: 0)"
            )

    def plans(self) -> list[Plan]:
        """The plans, the fastest as predicted first."""
        if self.fixed and self.current is not None:
            return rollout_plans(self.planner, self.current, self.records)[: self.most]
        return self.planner.candidates(self.records, self.most, self.current)

    def scores(self, plans: Sequence[Plan]) -> Iterator[float]:
        """Simulated seconds of the plan in force, if there is one, then of each of ``plans``."""
        groups = grouped(self.traces or traces_of(self.records))
        for plan in [self.current, *plans] if self.current is not None else plans:
            if max(self.planner.evaluate(plan, self.records)) == inf:  # no instance holds the longest request
                yield inf
                continue
            yield simulated_seconds(self.planner, plan, groups, self.router, self.alpha, options=self.options)

    def best(self) -> Rescored | None:
        """The best plan as simulated, of all that there are; None where there are none."""
        plans = self.plans()
        return self.judged(plans, list(self.scores(plans)))

    def judged(self, plans: Sequence[Plan], scores: Sequence[float]) -> Rescored | None:
        """The outcome of as many ``scores`` as there are; None while none is of a candidate."""
        current = scores[0] if self.current is not None and scores else None
        mine = scores[1:] if self.current is not None else scores
        if not mine:
            return None
        best = min(range(len(mine)), key=mine.__getitem__)
        return Rescored(plans[best], mine[best], mine[0], len(mine), len(plans), current)


def cmlfq_for(planner: Planner, options: Mapping[str, Any] | None = None) -> BucketPolicy:
    """C-MLFQ with the planner's own cost figures, least loaded where a plan is mixed. ``options`` go before them."""
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
    return PlanRouting(CMlfq({"cost": cost, **(options or {})}))


def router_for(planner: Planner, kind: str, options: Mapping[str, Any]) -> BucketPolicy:
    """A fresh bucket policy of ``kind``. Raises `ConfigError` for one that does not exist."""
    if kind == "cmlfq":
        return cmlfq_for(planner, options)
    if kind == "least_loaded":
        return LeastLoaded(options)
    return PlanRouting(load_policy({"kind": kind, **options}))


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
    planner: Planner,
    plan: Plan,
    groups: Sequence[Sequence[Trace]],
    router: str,
    alpha: int,
    offload: bool = True,
    options: Mapping[str, Any] | None = None,
) -> float:
    """Mean seconds of a step of ``plan`` when batches like ``groups`` come again and again."""
    hardware = planner.inventory.spec(plan.train_kind)
    moves = Moves(float(planner.model.kv_bytes_per_token), hardware.host_copy_gb_per_s * 1e9, hardware.network, offload)

    def group(number: int) -> list[Trace]:
        epoch, which = divmod(number, len(groups))
        return [replace(trace, name=f"p{which}e{epoch}m{member}") for member, trace in enumerate(groups[which])]

    config = LoopConfig(_STEPS, len(groups), max(map(len, groups)), alpha)
    result = RunLoop(config, planner, plan, group, router_for(planner, router, options or {}), moves).run()
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
    return Rescored(plans[best], scores[best], scores[0], len(scores), len(plans))


def grouped(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Traces by group, in order."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(trace.group, []).append(trace)
    return list(found.values())
