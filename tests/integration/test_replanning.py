"""The plugin replans on real Dask processes: the workload drifts on purpose, roles move once and not back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_parts import awaited
from cluster_parts import AnyRoleCluster, Play, playing, spec
from distributed import Client
from workloads import records

from libra.resources import wire
from libra.resources.tags import Role
from libra.resources.types import RequestRecord
from libra.scheduler_plugin.planner.online import Online, OnlineConfig, WorkerDevice
from libra.scheduler_plugin.planner.planner import Planner
from libra.scheduler_plugin.roles import Duty

pytestmark = pytest.mark.cluster

ROLES: dict[Role, int] = {"rollout": 4, "train": 2}
SHORT, LONG = 1_000.0, 20_000.0
PLANNER: dict[str, Any] = {
    "enabled": True,
    "model": "Qwen3-1.7B",
    "hardware": "h20",
    "train": "move",
    "rescore_seconds": 0,
    "planner": {"trainer": "scripted", "launches": {"dp": None}, "degrees": [1, 2]},
    "replan": {
        "interval": 1, "horizon": 20, "confirm": 2, "cool_down": 3, "settle": 1, "judge": 2, "window": 2,
        "switch_seconds": 1.0,
    },
}  # fmt: skip
SIMULATED = {"seconds": 60.0, "rescore_seconds": 30.0}
RUN = spec(
    buckets=[[1, None, 4]], roles={"rollout": 4, "tool": 0, "reward": 0, "train": 2}, planner=PLANNER,
    policy={"kind": "context_bounds"},
)  # fmt: skip


def planner() -> Planner:
    """The planner that the plugin has."""
    duties = [Duty("rollout", 1)] * 4 + [Duty("train")] * 2
    workers = [WorkerDevice(f"w{i}", "127.0.0.1", True, duty) for i, duty in enumerate(duties)]
    return Online(OnlineConfig.model_validate(PLANNER), workers).planner


def workload(step: int, mean: float) -> list[RequestRecord]:
    return records(96, seed=step, mean=mean)


async def duties(play: Play) -> dict[str, tuple[str | None, int | None, str]]:
    """What every worker does: role, TP degree, state."""
    status = await play.ask(wire.STATUS)
    return {name: (row["role"], row["tp"], row["state"]) for name, row in status["roles"].items()}


def seconds_of(
    model: Planner, now: dict[str, tuple[str | None, int | None, str]], batch: list[RequestRecord]
) -> tuple[float, float]:
    """What a step and its update take on engines and trainers that do as the cost model says, in the roles of this
    moment."""
    trained = sum(role == "train" for role, _, _ in now.values())
    degrees = sorted(tp or 1 for role, tp, _ in now.values() if role == "rollout")
    _, side, _ = model.searches(batch, model.inventory.hardware[0])
    counts = tuple(degrees.count(tp) for tp in side.degrees)
    tree = model.train_tree(model.inventory.hardware[0], batch)
    best = tree.best(trained)
    assert best is not None
    return max(best[1], side.mixed_seconds(counts)), best[1]


async def report(play: Play, model: Planner, step: int, mean: float) -> float:
    """One step of the run: its seconds in the present roles, give or take 3 %; returns them without the noise."""
    batch = workload(step, mean)
    seconds, trained = seconds_of(model, await duties(play), batch)
    noise = float(np.random.default_rng(step).uniform(0.97, 1.03))
    rows = [record.to_plain() for record in batch]
    await play.ask(wire.REPORT_STEP, step=step, seconds=seconds * noise, train_seconds=trained, records=rows)
    await considered(play, step)
    while not all(state in ("ready", "idle") for _, _, state in (await duties(play)).values()):
        await asyncio.sleep(0.02)
    return seconds


async def considered(play: Play, step: int) -> None:
    """Until the report of ``step`` was decided on (or came while roles changed)."""
    while True:
        counters = (await play.ask(wire.STATUS))["counters"]
        assert not any(name.startswith("alarm") for name in counters), counters
        if sum(counters.get(f"replan:{action}", 0) for action in ("keep", "apply", "roll_back", "busy")) >= step:
            return
        await asyncio.sleep(0.02)


@awaited
async def test_a_drift_moves_roles_once_and_not_back() -> None:
    async with AnyRoleCluster(ROLES) as cluster, playing(cluster.scheduler_address, RUN) as play:
        model = planner()
        await play.until("role", count=2, role="train", state="ready")
        before = await duties(play)
        steady = [await report(play, model, step, SHORT) for step in range(1, 6)]
        assert await duties(play) == before, "steady work is left alone"
        drifted = [await report(play, model, step, LONG) for step in range(6, 18)]
        applied = [e for e in play.events if e["event"] == "replan" and e["action"] in ("apply", "roll_back")]
        assert [e["action"] for e in applied] == ["apply"], applied
        after = await duties(play)
        moved = {name for name in before if before[name][:2] != after[name][:2]}
        assert moved == set(applied[0]["moved"]) and moved
        assert all(after[name] == before[name] for name in before if name not in moved)
        assert {state for role, _, state in after.values() if role} == {"ready"}
        judged = [e for e in play.events if e["event"] == "replan" and e["action"] == "judged"]
        assert judged[-1]["reason"] == "as predicted", judged
        assert np.mean(drifted[-4:]) < np.mean(drifted[:2])
        assert len(steady) == 5


@awaited
async def test_requests_go_to_the_new_instances() -> None:
    async with AnyRoleCluster(ROLES) as cluster, playing(cluster.scheduler_address, RUN) as play:
        model, step = planner(), 0
        running = asyncio.create_task(play.first("g0m0", seconds=0.2))
        while not [e for e in play.events if e["event"] == "replan" and e["action"] == "apply"]:
            step += 1
            await report(play, model, step, LONG)
            assert step < 12
        assert (await running)["tag"].startswith("rollout:tp"), "what ran went on"
        found = [await play.first(f"g1m{member}") for member in range(8)]
        ready = {name: row for name, row in (await duties(play)).items() if row[0] == "rollout"}
        assert {each["worker"] for each in found} <= set(ready)
        assert all(each["offered"] >= 1 and each["tag"] == each["role"] for each in found)


@awaited
async def test_plans_are_simulated_before_one_is_applied_and_the_count_is_told() -> None:
    run = spec(buckets=RUN.buckets, roles=RUN.roles, policy=RUN.policy, planner=PLANNER | SIMULATED)
    async with AnyRoleCluster(ROLES) as cluster, playing(cluster.scheduler_address, run) as play:
        model, step = planner(), 0
        await play.until("role", count=2, role="train", state="ready")
        while not (told := [e for e in play.events if e["event"] == "replan" and e["action"] == "apply"]):
            step += 1
            await report(play, model, step, LONG)
            assert step < 12
        assert told[0]["simulated"] >= 1
        assert f"{told[0]['simulated']} of " in told[0]["reason"]
        assert "plans simulated" in told[0]["reason"]


@awaited
async def test_a_run_that_does_not_ask_is_never_replanned() -> None:
    plain = spec(buckets=RUN.buckets, roles=RUN.roles, policy=RUN.policy)
    async with AnyRoleCluster(ROLES) as cluster, playing(cluster.scheduler_address, plain) as play:
        await play.until("role", count=2, role="train", state="ready")
        before = await duties(play)
        rows = [record.to_plain() for record in workload(1, LONG)]
        for step in range(1, 5):
            await play.ask(wire.REPORT_STEP, step=step, seconds=1e6, records=rows)
        assert await duties(play) == before
        assert not [e for e in play.events if e["event"] == "replan"]


@awaited
async def test_a_planner_that_cannot_plan_refuses_the_claim_and_says_why() -> None:
    async with AnyRoleCluster(ROLES) as cluster, Client(cluster, asynchronous=True) as client:
        wrong = {
            "no spec": ({**PLANNER, "model": "Qwen3-5B"}, "there is no model spec 'Qwen3-5B'"),
            "no model": ({"enabled": True}, "planning needs 'model'"),
            "a typo": ({**PLANNER, "trian": "move"}, "trian"),
        }
        for changed, says in wrong.values():
            run = spec(buckets=RUN.buckets, roles=RUN.roles, planner=changed)
            reply = await getattr(client.scheduler, wire.CLAIM)(spec=run.to_wire(), client=client.id)
            assert says in reply["error"]


PROMISES = """
name: promises
model: quickstart
hardware: cpu
provenance: {status: measured, source: a wish, machine: none, date: "2026-01-01"}
rollout:
- {tp: 1, step_s: 0.005, sequence_s: 0, token_s: 0, admission_s: 0, prefill_token_s: 0, prefill_pair_s: 0,
   capacity_tokens: 65536, slots: 64}
- {tp: 2, step_s: 0.0005, sequence_s: 0, token_s: 0, admission_s: 0, prefill_token_s: 0, prefill_pair_s: 0,
   capacity_tokens: 65536, slots: 64}
training: {linear: 0, quadratic: 0, constant: 0, fixed_seconds: 0.01}
"""
"""A profile that promises of TP 2 what no scripted engine keeps."""


def test_a_real_run_changes_and_comes_back_from_a_plan_that_disappoints(tmp_path: Path) -> None:
    profile = tmp_path / "promises.yaml"
    profile.write_text(PROMISES)
    quick = "{interval: 1, confirm: 1, cool_down: 1, settle: 1, judge: 1, switch_seconds: 0.01, minimum_gain: 0.05}"
    overrides = [
        "steps=10", "eval.tasks=0", "engine.options.step_seconds=5 ms", "cluster.dashboard=false",
        "cluster.workers.rollout=2", "buckets=[{tp: 1, instances: 2}]", "planner.enabled=true",
        "planner.model=quickstart", f"planner.profile={profile}", f"planner.replan={quick}",
        "planner.rescore_seconds=0",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "from libra.pipeline.cli import main; main()", "train", "scripted", *overrides],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("planner: ")]
    actions = [line.split(": ")[1] for line in told if "judged" not in line]
    assert actions[:2] == ["apply", "switched"], done.stdout
    assert "roll_back" in actions, done.stdout
    assert actions.count("apply") == 1, "what disappointed is barred"
    assert "scripted finished at step 10 of 10" in done.stdout
