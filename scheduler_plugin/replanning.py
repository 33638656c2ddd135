"""Replanning of the run that holds the cluster: reports in, role changes out.

    driver reports a step ─> figures (in a thread) ─> decision ─> roles and buckets change ─> all there: cost known

Invariants: the scheduler's event loop only decides, it never computes a plan; one plan is in the making at a time, for
at most ``planner.seconds``, and a step that is reported meanwhile only adds its records; every decision but *keep* is
told to the driver, and so is how a change turned out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pydantic import ValidationError

from libra.resources.errors import ConfigError, DeadlineError
from libra.resources.types import RequestRecord
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.assignment import Candidate
from libra.scheduler_plugin.listing import in_order, is_there
from libra.scheduler_plugin.planner.online import Figures, Online, OnlineConfig, Seen, WorkerDevice
from libra.scheduler_plugin.planner.replan import Decision
from libra.scheduler_plugin.planner.routing import PlanRouting, buckets_of
from libra.scheduler_plugin.pool import Pool
from libra.scheduler_plugin.roles import Duty
from libra.scheduler_plugin.routing import RoutingTable

_ROLES = ("rollout", "train")


def online_of(
    spec: RunSpec, candidates: Sequence[Candidate], nodes: Mapping[str, str], duties: Mapping[str, Duty]
) -> Online | None:
    """The planning that a run asks for; None when it asks for none. ``nodes``: host of each worker. Raises
    `ConfigError`."""
    try:
        config = OnlineConfig.model_validate(spec.planner)
    except ValidationError as error:
        raise ConfigError(f"planner: {error}") from None
    if not config.enabled:
        return None
    workers = []
    for each in sorted(candidates, key=lambda c: c.name):
        duty = duties.get(each.name)
        if duty.role in _ROLES if duty else each.may("rollout"):
            able = each.may("rollout") and each.may("train")
            workers.append(WorkerDevice(each.name, nodes[each.name], able, duty))
    return Online(config, workers)


class Replanning:
    """Of one claim. ``tell(event, **fields)`` sends an event to the driver."""

    def __init__(self, online: Online, pool: Pool, table: RoutingTable, alarms: Alarms, tell: Callable[..., None]):
        self._online, self._pool, self._table, self._alarms, self._tell = online, pool, table, alarms, tell
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="libra-planner")
        self._computing: Future[Figures] | None = None
        self._look: asyncio.Task[None] | None = None
        self._changing: tuple[float, dict[str, Duty | None]] | None = None
        table.policy = PlanRouting(table.policy)

    def report(self, step: int, seconds: float, records: Sequence[RequestRecord]) -> None:
        """A step has ended. Planned for unless a plan is in the making or roles still change."""
        seen = Seen(step, seconds, tuple(records))
        self._online.saw(seen)
        if self._changing is not None or (self._computing is not None and not self._computing.done()):
            self._alarms.count("replan:busy")
            return
        self._computing = self._thread.submit(self._online.figures, seen, self._online.window())
        self._look = asyncio.create_task(self._consider(seen, self._computing))

    def tick(self) -> None:
        """See whether a change of roles has come to its end."""
        if self._changing is None:
            return
        began, duties = self._changing
        if all(is_there(self._pool.states.get(name), duty) for name, duty in duties.items()):
            self._changing = None
            seconds = time.monotonic() - began
            self._online.replanner.switched(seconds)
            self._tell(
                "replan", action="switched", reason=f"every role is there after {seconds:.2f} s", seconds=seconds
            )

    def end(self) -> None:
        """The claim ends: nothing is changed any more."""
        self._changing = None
        if self._look is not None:
            self._look.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _consider(self, seen: Seen, computing: Future[Figures]) -> None:
        limit = self._online.config.seconds
        try:
            async with asyncio.timeout(limit):
                figures = await asyncio.wrap_future(computing)
            judged = len(self._online.replanner.outcomes)
            decision = self._online.decide(seen, figures)
        except TimeoutError:
            self._alarms.ring("replanning", DeadlineError("a plan", "the planner's thread", limit, "planner.seconds"))
            return
        except Exception as error:  # noqa: BLE001 - the run goes on under the plan in force; the alarm tells
            self._alarms.ring("replanning", error)
            return
        for outcome in self._online.replanner.outcomes[judged:]:
            fields = {"step": outcome.step, "predicted": outcome.predicted, "seconds": outcome.measured}
            self._tell("replan", action="judged", reason=decision.reason, **fields)
        self._alarms.count(f"replan:{decision.action}")
        if decision.action != "keep":
            self._carry_out(seen.step, decision)

    def _carry_out(self, step: int, decision: Decision) -> None:
        """Tell every worker what it does now; those that go on as they are see no change."""
        duties = self._online.duties(decision.plan)
        moved = dict(in_order(duties, self._wanted))
        self._tell(
            "replan", action=decision.action, reason=decision.reason, step=step, gain=decision.gain_seconds,
            cost=decision.cost_seconds, plan=f"train {decision.plan.strategy.gpus}, roll out {decision.plan.layout}",
            moved=sorted(moved),
        )  # fmt: skip
        self._table.rebucket(buckets_of(decision.plan))
        for name, duty in moved.items():
            self._pool.assign(name, duty)
        self._changing = (time.monotonic(), moved)

    def _wanted(self, name: str) -> Duty | None:
        state = self._pool.states.get(name)
        return None if state is None else state.wanted
