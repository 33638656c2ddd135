"""Replanning of the run that holds the cluster: reports in, role changes out.

    driver reports a step ─> figures (in a thread) ─> decision ─> roles and buckets change ─> all there: cost known

Invariants: the scheduler's event loop only decides, it never computes a plan, and plans are simulated in a child
process that ends with the claim; one plan is in the making at a time, for at most ``planner.seconds``, and a step that
is reported meanwhile only adds its records; every decision but *keep* is told to the driver, and so is how a change
turned out, and when costs had changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from pydantic import ValidationError

from libra.resources.errors import ConfigError, DeadlineError, LibraError
from libra.resources.types import RequestRecord
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.assignment import Candidate
from libra.scheduler_plugin.listing import in_order, is_there
from libra.scheduler_plugin.planner.online import Online, OnlineConfig, WorkerDevice
from libra.scheduler_plugin.planner.replan import Decision, Seen
from libra.scheduler_plugin.planner.rescore import Job, Rescored
from libra.scheduler_plugin.planner.rescoring import Rescoring
from libra.scheduler_plugin.planner.routing import PlanRouting, buckets_of
from libra.scheduler_plugin.planner.steering import Figures
from libra.scheduler_plugin.pool import Pool
from libra.scheduler_plugin.roles import Duty
from libra.scheduler_plugin.routing import RoutingTable

logger = logging.getLogger("distributed.libra")

_ROLES = ("rollout", "train")


def online_of(
    spec: RunSpec,
    candidates: Sequence[Candidate],
    nodes: Mapping[str, str],
    duties: Mapping[str, Duty],
    kinds: Mapping[str, str] | None = None,
) -> Online | None:
    """The planning that a run asks for; None when it asks for none. ``nodes``: host of each worker; ``kinds``: of
    hardware, of those that say so. Raises `ConfigError`."""
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
            workers.append(WorkerDevice(each.name, nodes[each.name], able, duty, (kinds or {}).get(each.name)))
    return Online(config, workers, spec.policy)


class Replanning:
    """Of one claim. ``tell(event, **fields)`` sends an event to the driver; ``rescoring`` simulates plans (None: as the
    config says)."""

    def __init__(
        self,
        online: Online,
        pool: Pool,
        table: RoutingTable,
        alarms: Alarms,
        tell: Callable[..., None],
        rescoring: Rescoring | None = None,
    ) -> None:
        self._online, self._pool, self._table, self._alarms, self._tell = online, pool, table, alarms, tell
        seconds = online.config.rescore_seconds
        self._rescoring = rescoring or (Rescoring(seconds) if seconds > 0 else None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="libra-planner")
        self._computing: Future[Figures] | None = None
        self._look: asyncio.Task[None] | None = None
        self._changing: tuple[float, dict[str, Duty | None]] | None = None
        table.policy = PlanRouting(table.policy)

    def report(
        self, step: int, seconds: float, records: Sequence[RequestRecord], train_seconds: float | None = None
    ) -> None:
        """A step has ended. Planned for unless a plan is in the making or roles still change."""
        seen = Seen(step, seconds, tuple(records), train_seconds)
        self._online.saw(seen)
        if self._changing is not None or (self._computing is not None and not self._computing.done()):
            self._alarms.count("replan:busy")
            return
        self._computing = self._thread.submit(self._figures, seen, self._online.window())
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
        if self._rescoring is not None:
            self._rescoring.cancel()
        if self._look is not None:
            self._look.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _figures(self, seen: Seen, window: Sequence[RequestRecord]) -> Figures:
        """In the planner's thread. Where plans cannot be simulated the closed form's stands, and the alarm tells."""
        failed: list[LibraError] = []

        def simulate(job: Job) -> Rescored | None:
            assert self._rescoring is not None
            try:
                return self._rescoring.run(job)
            except LibraError as error:
                failed.append(error)
                return None

        figures = self._online.figures(seen, window, simulate if self._rescoring is not None else None)
        return replace(figures, failed=failed[0]) if failed else figures

    async def _consider(self, seen: Seen, computing: Future[Figures]) -> None:
        limit = self._online.config.seconds
        try:
            async with asyncio.timeout(limit):
                figures = await asyncio.wrap_future(computing)
            if figures.failed is not None:
                self._alarms.ring("rescoring", figures.failed)
            judged, resets = len(self._online.replanner.outcomes), self._online.following.resets
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
        if self._online.following.resets > resets:
            self._tell(
                "replan", action="corrected", reason=f"costs have changed: {self._online.following}", step=seen.step
            )
        self._alarms.count(f"replan:{decision.action}")
        self._log(seen, figures, decision)
        if decision.action != "keep":
            self._carry_out(seen.step, decision, figures)

    def _log(self, seen: Seen, figures: Figures, decision: Decision) -> None:
        """A line a step in the scheduler's log."""
        simulated = _count_of(figures)
        shares = ", ".join(f"{domain} {share:.0%}" for domain, share in self._online.domains.shares.items())
        logger.info(
            "libra: step %d took %.2f s, predicted %.2f s (%s): %s, %s; %s; prefill shares: %s", seen.step,
            seen.seconds, figures.predicted, self._online.following, decision.action, decision.reason, simulated,
            shares,
        )  # fmt: skip

    def _carry_out(self, step: int, decision: Decision, figures: Figures) -> None:
        """Tell every worker what it does now; those that go on as they are see no change."""
        duties = self._online.duties(decision.plan)
        moved = dict(in_order(duties, self._wanted))
        plan = decision.plan
        rolling = ", ".join(f"{part.layout} on {part.kind}" for part in plan.rollout)
        told = [decision.reason]
        if decision.action == "apply":
            told.append(_count_of(figures))
        told += [f"{name} on {kind}" for name, kind in self._online.classes(plan).items()]
        self._tell(
            "replan", action=decision.action, reason="; ".join(told), step=step, gain=decision.gain_seconds,
            cost=decision.cost_seconds, plan=f"train {plan.strategy.gpus}, roll out {rolling}", moved=sorted(moved),
            simulated=0 if figures.simulated is None else figures.simulated.count,
            corrections=[self._online.following.rollout.factor, self._online.following.training.factor],
            prefill_shares=self._online.domains.shares, classes=self._online.classes(plan),
        )  # fmt: skip
        self._table.rebucket(buckets_of(decision.plan))
        for name, duty in moved.items():
            self._pool.assign(name, duty)
        if moved:
            self._changing = (time.monotonic(), moved)

    def _wanted(self, name: str) -> Duty | None:
        state = self._pool.states.get(name)
        return None if state is None else state.wanted


def _count_of(figures: Figures) -> str:
    """How many plans were simulated."""
    found = figures.simulated
    return "no plan simulated" if found is None else f"{found.count} of {found.offered} plans simulated"
