"""The worker side on a real scheduler: roles come and go, bodies find them, released bodies end."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from child_parts import CALL, STOP, awaited
from kv_parts import get, put
from worker_harness import Cluster, cluster, run_spec, until, weights

from libra.resources import wire
from libra.resources.batches import write_batch
from libra.resources.codec import segment_from_wire, tool_return_from_wire, trajectory_to_wire
from libra.resources.errors import DeadlineError, InfraError, StoreError, TaskError
from libra.resources.kv.arena import Arena
from libra.resources.kv.ownership import arena_path
from libra.resources.types import Tokens, ToolReturn, Trajectory, TrajectoryId
from libra.tasks.arena import WorkerArena
from libra.tasks.kv import Hint, Staging
from libra.tasks.reward import reward
from libra.tasks.rollout import RolloutRole, rollout
from libra.tasks.tool import tool
from libra.tasks.train import TrainRole, checkpoint, initialise, publish, restore, train

pytestmark = pytest.mark.cluster

PROMPT = np.array([9, 9], np.int32)


def rollout_request(name: str, tokens: np.ndarray = PROMPT, turn: int = 0, max_new: int = 20) -> dict[str, Any]:
    return {
        "key": f"rollout-000000-0badcafe-{name}-{turn}-0",
        "trajectory": name,
        "turn": turn,
        "tokens": tokens,
        "max_new": max_new,
        "heldout": name.startswith("h"),
        "cut": 0,
    }


def tool_request(name: str, returns: list[ToolReturn], context: int, finish: bool = False) -> dict[str, Any]:
    return {
        "key": f"tool-000000-0badcafe-{name}-{len(returns)}-0",
        "trajectory": name,
        "turn": len(returns),
        "call": {"name": "count"},
        "task": {"prompt": 0},
        "history": [{"call": r.call, "digest": r.digest} for r in returns],
        "context": context,
        "finish": finish,
    }


def finished(name: str = "g0m0", turns: int = 2) -> Trajectory:
    n = 4 + 2 * turns
    ids = np.arange(n, dtype=np.int32)
    mask = (ids >= 2).astype(np.int8)
    versions = np.where(mask == 1, 0, -1).astype(np.int32)
    logprobs = np.zeros(n, np.float32)
    identity = TrajectoryId.parse(name)
    return Trajectory(identity, 0, 0, {"prompt": 0}, 2, ids, mask, logprobs, versions, (), turns, "answer", 1.0)


def endless(tmp_path: Path, **engine: Any) -> Any:
    spec = run_spec(tmp_path)
    options = {"script": "child_parts:endless", "step_seconds": 0.01}
    return replace(spec, engine={**spec.engine, "options": options, **engine}, max_turn_tokens=400)


@awaited
async def test_a_trajectory_from_its_prompt_to_its_reward(tmp_path: Path) -> None:
    spec = run_spec(tmp_path)
    async with cluster(workers=3) as c:
        await c.ready(0, "rollout", spec, weights(tmp_path))
        await c.ready(1, "tool", spec)
        await c.ready(2, "reward", spec)
        result = await c.run(0, rollout, rollout_request("g0m0"))
        segment = segment_from_wire(result["segment"])
        assert segment.tokens.tolist() == [CALL, STOP]
        assert (segment.finish, segment.context, segment.instance) == ("stop", 2, "a")
        assert segment.versions.tolist() == [0, 0]
        assert segment.started <= segment.ended
        assert result["action"] == {"kind": "call", "call": {"name": "count"}, "end": ""}
        assert result["tool"] is None

        returns: list[ToolReturn] = []
        context = np.concatenate([PROMPT, segment.tokens])
        for turn in (1, 2):
            request = tool_request("g0m0", returns, len(context))
            called = c.submit(1, tool, request)
            result = await c.run(0, rollout, rollout_request("g0m0", context, turn), called)
            returned = tool_return_from_wire(result["tool"])
            left = c.recorder.results[request["key"]]
            assert left == {"state": ("count", 0, "ok"), "context": len(context) + 2}
            segment = segment_from_wire(result["segment"])
            assert segment.context == left["context"]
            assert segment.cached > 0
            context = np.concatenate([context, returned.payload, segment.tokens])
            returns.append(returned)
        assert [int(r.payload[0]) for r in returns] == [101, 102]
        assert result["action"] == {"kind": "final", "call": {}, "end": "answer"}

        trajectory = replace(finished(), tools=tuple(returns))
        end = c.submit(1, tool, tool_request("g0m0", returns, len(context), finish=True))
        key = "reward-000000-0badcafe-g0m0-0-0"
        request = {"key": key, "task": {"prompt": 0}, "trajectory": trajectory_to_wire(trajectory)}
        assert await c.run(2, reward, request, end) == {"reward": 4.0, "artifact": {"calls": 2}}

        c.send(1, wire.FORGET, trajectories=["g0m0"])
        await until(lambda: c.recorder.heartbeats["b"]["stats"].get("sessions") == 0, "the session to be dropped")


@awaited
async def test_a_context_without_room_ends_the_trajectory(tmp_path: Path) -> None:
    spec = endless(tmp_path)
    async with cluster() as c:
        await c.ready(0, "rollout", spec, weights(tmp_path))
        for name, length, sampled in (("g0m0", 400, 0), ("g0m1", 401, 0), ("g0m2", 397, 3)):
            result = await c.run(0, rollout, rollout_request(name, np.ones(length, np.int32)))
            assert len(segment_from_wire(result["segment"]).tokens) == sampled
            assert result["action"] == {"kind": "final", "call": {}, "end": "tokens"}
        result = await c.run(0, rollout, rollout_request("g0m3", np.ones(20, np.int32), max_new=3))
        assert result["action"]["end"] == "malformed"


@awaited
async def test_a_rollout_role_is_ready_once_weights_are_loaded(tmp_path: Path) -> None:
    async with cluster() as c:
        epoch = c.start(0, "rollout", run_spec(tmp_path))
        await until(lambda: c.plugin().state == "waiting", "the engine to be up")
        assert c.recorder.states() == []
        with pytest.raises(InfraError, match=r"the role 'rollout' \(waiting\)"):
            await c.submit(0, rollout, rollout_request("g0m0"))
        c.send(0, wire.LOAD_WEIGHTS, epoch=epoch, weights=weights(tmp_path, 3))
        report = await c.recorder.state(epoch, "ready")
        assert (report["role"], report["version"], report["slots"], report["error"]) == ("rollout", 3, 4, None)

        # Loaded again, a wrong version, the next one, and one for an epoch that is over.
        wrong = {"version": 4, "path": str(tmp_path / "nowhere"), "digest": "0"}
        for number, published in enumerate((weights(tmp_path, 3), wrong, weights(tmp_path, 5))):
            c.send(0, wire.LOAD_WEIGHTS, epoch=epoch, weights=published)
            await until(lambda number=number: len(loads(c)) == 2 + number, "the answer")
        c.send(0, wire.LOAD_WEIGHTS, epoch=epoch - 1, weights=weights(tmp_path, 6))
        assert [answer["version"] for answer in loads(c)] == [3, 3, 4, 5]
        assert [answer["error"] is None for answer in loads(c)] == [True, True, False, True]
        assert "no published weights" in loads(c)[2]["error"]
        result = await c.run(0, rollout, rollout_request("g0m1"))
        assert segment_from_wire(result["segment"]).versions.tolist() == [5, 5]
        assert len(loads(c)) == 4
        await until(lambda: c.recorder.heartbeats["a"]["stats"].get("sampled") == 2, "stats in the heartbeat")
        assert c.recorder.heartbeats["a"]["version"] == 5


def loads(c: Cluster) -> list[dict[str, Any]]:
    return [answer for answer in c.recorder.answers if answer["op"] == wire.WEIGHTS_LOADED]


@awaited
async def test_a_released_rollout_is_cancelled_and_its_slot_is_free(tmp_path: Path) -> None:
    async with cluster() as c:
        await c.ready(0, "rollout", endless(tmp_path, slots=2), weights(tmp_path))
        plugin = c.plugin()
        role = plugin.role
        assert isinstance(role, RolloutRole)
        limits = [390, 390, 390, 390, 150]
        futures = [c.submit(0, rollout, rollout_request(f"g0m{n}", max_new=limits[n])) for n in range(5)]
        await until(lambda: len(plugin.bodies) == 5, "the bodies to run")
        engine = role._engine.result()
        for future in futures[:4]:
            future.release()
        await until(lambda: len(plugin.bodies) == 1, "four bodies to end")
        stats = await engine.call("stats", seconds=30)
        assert stats["running"] + stats["waiting"] == 1
        assert len(c.workers[0].state.executing) == 1
        # The last one, and one that takes a cancelled key again, end well.
        again = c.submit(0, rollout, rollout_request("g0m0", max_new=5))
        await asyncio.wait_for(again, 60)
        await asyncio.wait_for(futures[4], 60)
        assert len(plugin.bodies) == 0
        assert len(c.workers[0].state.tasks) == 2


@awaited
async def test_a_key_that_is_released_and_wanted_again_at_once_ends_well(tmp_path: Path) -> None:
    async with cluster() as c:
        await c.ready(0, "rollout", endless(tmp_path), weights(tmp_path))
        request = rollout_request("g0m0", max_new=15)
        for _ in range(5):
            future = c.submit(0, rollout, request)
            await until(lambda: len(c.plugin().bodies) == 1, "the body to run")
            future.release()
            # Dask may see the key again before the cancelled body has ended.
            future = c.submit(0, rollout, request)
            await asyncio.wait_for(future, 60)
            future.release()
            await until(lambda: not c.scheduler.tasks, "the key to be forgotten")


@awaited
async def test_a_dying_engine_fails_its_requests_in_its_own_words_and_is_reported_lost(tmp_path: Path) -> None:
    spec = replace(
        run_spec(tmp_path), engine={"kind": "child_parts:CrashingEngine", "slots": 4, "options": {"vocab": 1000}}
    )
    async with cluster() as c:
        epoch = await c.ready(0, "rollout", spec, weights(tmp_path))
        futures = [c.submit(0, rollout, rollout_request(f"g0m{n}")) for n in range(3)]
        for future in futures:
            with pytest.raises(InfraError, match="device-side assert: index 640 is out of bounds"):
                await future
        report = await c.recorder.state(epoch, "lost")
        assert "device-side assert" in report["error"]
        with pytest.raises(InfraError, match="device-side assert"):
            await c.submit(0, rollout, rollout_request("g1m0"))
        epoch = await c.ready(0, "rollout", run_spec(tmp_path), weights(tmp_path))
        await c.run(0, rollout, rollout_request("g2m0"))


@awaited
async def test_roles_that_cannot_start_say_why(tmp_path: Path) -> None:
    good = run_spec(tmp_path)
    cases = [
        ("rollout", replace(good, engine={"kind": "scripte"}), "did you mean 'scripted'"),
        ("rollout", replace(good, engine={"kind": "child_parts:UnbuildableEngine"}), "no file named config.json"),
        ("tool", replace(good, environment={"kind": "child_parts:CountingEnvironmen"}), "CountingEnvironment"),
        ("train", replace(good, trainer={"kind": "scripted", "options": {"speed": 1}}), "speed"),
        ("rollout", replace(good, engine={"kind": "scripted", "slots": 0}), "slots"),
        ("cook", good, "cook"),
    ]
    async with cluster() as c:
        for role, spec, words in cases:
            report = await c.recorder.state(c.start(0, role, spec, weights(tmp_path)), "failed")
            assert words in report["error"]
        with pytest.raises(InfraError, match="needs a worker with the role 'rollout'"):
            await c.submit(0, rollout, rollout_request("g0m0"))
        # The worker is none the worse for it.
        await c.ready(0, "tool", good)


@awaited
async def test_staged_kv_outlives_engine_and_role_and_ends_with_the_run(tmp_path: Path) -> None:
    engine = {"kind": "child_parts:StagingEngine", "slots": 4, "max_context": 500, "kv_arena": 4 * 2**20}
    run = replace(run_spec(tmp_path), engine={**engine, "options": {"vocab": 9}})
    path, tokens = arena_path(run.run, "a"), list(range(10))
    asked = {"run": run.run, "version": 0, "context": np.array(tokens, np.int32).tobytes()}
    async with cluster(2) as c:
        plugin, peer = c.plugin(), c.workers[1].rpc(c.workers[0].address)
        published = weights(tmp_path)

        async def answers(trajectory: str) -> int | None:
            """The tokens that another worker would be told of."""
            found: int | None = (await peer.libra_kv_entry(trajectory=trajectory, **asked)).get("matched")
            return found

        await c.ready(0, "rollout", run, published)
        with Arena(path, writable=True) as arena:
            for name in ("g0m0", "g1m0", "g2m0"):
                assert put(arena, name, 0, tokens) == "stored"
            assert await answers("g0m0") == 10
            assert isinstance(plugin.role, RolloutRole)
            psutil.Process(plugin.role._engine.result().pid).kill()
            await until(lambda: plugin.state == "lost", "the engine's death to be noticed")
            assert await answers("g0m0") == 10
            await c.ready(0, "train", run)
            assert await answers("g0m0") == 10
            c.send(0, wire.FORGET, trajectories=["g0m0"])
            await until(lambda: get(arena, "g0m0", 0, tokens) == "absent", "the trajectory to be forgotten")
            await c.ready(0, "rollout", run, published)
            assert (await answers("g0m0"), await answers("g1m0")) == (None, 10)
            assert not arena.removed
        other = replace(run, run="0badcaff")
        await c.ready(0, "tool", other)
        assert not path.exists()
        await c.ready(0, "rollout", other, published)
        epoch = await c.ready(0, "tool", other)
        assert arena_path(other.run, "a").exists()
        c.send(0, wire.STOP_ROLE, epoch=epoch, run_ends=True)
        await c.recorder.state(epoch, "stopped")
        assert not arena_path(other.run, "a").exists()
        await c.ready(0, "rollout", run, published)
        assert path.exists()
    assert not path.parent.exists()  # it ends with the worker


@awaited
async def test_whatever_keeps_weights_from_loading_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lend(arena: WorkerArena, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/libra-r1-kv-a")

    monkeypatch.setattr(WorkerArena, "lend", lend)
    engine = {"kind": "child_parts:StagingEngine", "slots": 4, "max_context": 500, "kv_arena": 4 * 2**20}
    spec = replace(run_spec(tmp_path), engine={**engine, "options": {"vocab": 9}})
    async with cluster() as c:
        epoch = c.start(0, "rollout", spec)
        await until(lambda: c.plugin().state == "waiting", "the engine to be up")
        c.send(0, wire.LOAD_WEIGHTS, epoch=epoch, weights=weights(tmp_path))
        await until(lambda: loads(c), "the answer")
        assert "No space left on device: '/dev/shm/libra-r1-kv-a'" in loads(c)[0]["error"]


@awaited
async def test_a_drain_that_begins_while_kv_is_brought_cuts_that_request_short_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bringing, brought = asyncio.Event(), asyncio.Event()

    async def bring(staging: Staging, trajectory: str, context: Tokens, hint: Hint, seconds: float) -> Hint:
        bringing.set()
        await brought.wait()
        return hint

    monkeypatch.setattr(Staging, "bring", bring)
    engine = {"kind": "child_parts:StagingEngine", "slots": 4, "max_context": 500, "kv_arena": 4 * 2**20}
    spec = replace(run_spec(tmp_path), engine={**engine, "options": {"vocab": 9}})
    async with cluster() as c:
        epoch = await c.ready(0, "rollout", spec, weights(tmp_path))
        running = asyncio.create_task(c.run(0, rollout, rollout_request("g0m0")))
        await bringing.wait()
        c.send(0, wire.DRAIN, epoch=epoch, drains=True)
        role = c.plugin().role
        assert isinstance(role, RolloutRole)
        await until(lambda: role._drains, "the drain to begin")
        brought.set()
        segment = segment_from_wire((await running)["segment"])
        assert (segment.finish, len(segment.tokens)) == ("abort", 0)


@awaited
async def test_a_start_is_superseded_without_leaving_a_process(tmp_path: Path) -> None:
    slow = replace(run_spec(tmp_path), engine={"kind": "child_parts:SilentEngine"})
    async with cluster() as c:
        children = set(psutil.Process().children())
        first = c.start(0, "rollout", slow, weights(tmp_path))
        await until(lambda: set(psutil.Process().children()) - children, "the engine to be starting")
        second = c.start(0, "rollout", slow, weights(tmp_path))
        c.send(0, wire.LOAD_WEIGHTS, epoch=second, weights=weights(tmp_path, 1))
        third = await c.ready(0, "tool", run_spec(tmp_path))
        c.send(0, wire.STOP_ROLE, epoch=third + 1, run_ends=False)
        report = await c.recorder.state(third + 1, "stopped")
        assert report["error"] is None
        assert [epoch for epoch, _ in c.recorder.states() if epoch in (first, second)] == []
        await until(lambda: loads(c), "the answer of the load that has no engine any more")
        assert loads(c)[0]["error"] is not None
        assert set(psutil.Process().children()) == children


@awaited
async def test_stopping_a_role_fails_what_runs_and_closing_the_worker_ends_children(tmp_path: Path) -> None:
    async with cluster() as c:
        epoch = await c.ready(0, "rollout", endless(tmp_path), weights(tmp_path))
        future = c.submit(0, rollout, rollout_request("g0m0", max_new=390))
        await until(lambda: len(c.plugin().bodies) == 1, "the body to run")
        c.send(0, wire.STOP_ROLE, epoch=epoch, run_ends=False)
        with pytest.raises(InfraError, match="being stopped"):
            await future
        await c.recorder.state(epoch, "stopped")
        await c.ready(0, "rollout", endless(tmp_path), weights(tmp_path))
        role = c.plugin().role
        assert isinstance(role, RolloutRole)
        process = psutil.Process(role._engine.result().pid)
        await c.workers[0].close()
        assert not process.is_running()


@awaited
async def test_bad_rewards_are_the_task_s_failure(tmp_path: Path) -> None:
    spec = run_spec(tmp_path)
    async with cluster() as c:
        for value, words in (("raise", "KeyError: 'answer'"), ("nan", "nan; an environment's rewards must be finite")):
            environment = {**spec.environment, "options": {"reward": value}}
            await c.ready(0, "reward", replace(spec, environment=environment))
            key = f"reward-000000-0badcafe-g0m0-0-{value}"
            with pytest.raises(TaskError, match=words):
                await c.submit(0, reward, {"key": key, "task": {}, "trajectory": trajectory_to_wire(finished())})


def key_of(kind: str, version: int, attempt: int = 0) -> str:
    return f"{kind}-{version:06d}-0badcafe-rank0-0-{attempt}"


@awaited
async def test_the_trainer_trains_publishes_saves_and_restores(tmp_path: Path) -> None:
    batch = tmp_path / "trajectories" / "000000"
    write_batch(batch, [finished(f"g0m{member}") for member in range(4)], {})
    async with cluster() as c:
        await c.ready(0, "train", run_spec(tmp_path))
        result = await c.run(0, initialise, {"key": key_of("initialise", 0), "seconds": 60})
        assert (result["version"], result["source"]) == (0, "scripted")
        assert any(answer["op"] == wire.PROGRESS for answer in c.recorder.answers)
        where = {"directory": str(tmp_path / "weights"), "seconds": 60}
        zero = await c.run(0, publish, {"key": key_of("publish", 0), **where})
        checkpointed = {"directory": str(tmp_path / "checkpoint"), "seconds": 60}
        assert await c.run(0, checkpoint, {"key": key_of("checkpoint", 0), **checkpointed}) == {"version": 0}

        step = {"path": str(batch), "rows": [0, 2], "seconds": 60}
        measures = await c.run(0, train, {"key": key_of("train", 0), **step})
        assert measures["version"] == 1
        assert measures["loss_tokens"] == 12
        again = await c.run(0, train, {"key": key_of("train", 0, attempt=1), **step})
        assert again == measures
        with pytest.raises(InfraError, match="is for version 5, but the trainer is at version 1"):
            await c.submit(0, train, {"key": key_of("train", 5), **step})
        for body, kind in ((publish, "publish"), (checkpoint, "checkpoint")):
            with pytest.raises(InfraError, match="is for version 0, but the trainer is at version 1"):
                await c.submit(0, body, {"key": key_of(kind, 0, attempt=9), **where})
        one = await c.run(0, publish, {"key": key_of("publish", 1), **where})
        assert (zero["version"], one["version"]) == (0, 1)
        assert zero["digest"] != one["digest"]

        assert await c.run(0, restore, {"key": key_of("restore", 0), **checkpointed}) == {"version": 0}
        await c.run(0, train, {"key": key_of("train", 0, attempt=2), **step})
        assert (await c.run(0, publish, {"key": key_of("publish", 1, attempt=1), **where}))["digest"] == one["digest"]
        with pytest.raises(StoreError, match="no whole checkpoint"):
            await c.submit(0, restore, {"key": key_of("restore", 9), "directory": str(tmp_path / "no"), "seconds": 60})
        with pytest.raises(StoreError):
            await c.submit(0, train, {"key": key_of("train", 1), **step, "path": str(tmp_path / "no")})


@awaited
async def test_a_lost_trainer_fails_its_task_and_is_reported(tmp_path: Path) -> None:
    batch = tmp_path / "trajectories" / "000000"
    write_batch(batch, [finished()], {})
    spec = replace(run_spec(tmp_path), trainer={"kind": "scripted", "options": {"train_seconds": 3600}})
    async with cluster() as c:
        epoch = await c.ready(0, "train", spec)
        await c.run(0, initialise, {"key": key_of("initialise", 0), "seconds": 60})
        role = c.plugin().role
        assert isinstance(role, TrainRole)
        assert role._trainer is not None
        step = {"path": str(batch), "rows": [0]}
        with pytest.raises(DeadlineError, match=r"waited 0\.2 s for 'train' of trainer of a"):
            await c.submit(0, train, {"key": key_of("train", 0), **step, "seconds": 0.2})
        future = c.submit(0, train, {"key": key_of("train", 0, attempt=1), **step, "seconds": 60})
        await until(lambda: len(c.plugin().bodies) == 1, "the body to run")
        psutil.Process(role._trainer.pid).kill()
        with pytest.raises(InfraError, match="ended with signal SIGKILL"):
            await future
        assert "SIGKILL" in (await c.recorder.state(epoch, "lost"))["error"]


NO_TORCH = """
import sys
from libra.tasks import worker, rollout, tool, reward, train
from libra.tasks.registry import environment_class, kinds
assert kinds("engine")
environment_class("hop")
print([name for name in ("torch", "transformers", "vllm") if name in sys.modules])
"""


def test_workers_import_no_torch(tmp_path: Path) -> None:
    here = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", NO_TORCH], cwd=here, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
