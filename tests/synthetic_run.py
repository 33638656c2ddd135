"""A run folder as a run leaves it behind, made in a second without a cluster: hop played by its scripted players."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from libra.pipeline.config import RunConfig, parse, to_plain
from libra.pipeline.store.run_folder import RunFolder
from libra.pipeline.view import events as happened
from libra.pipeline.view.view import View
from libra.resources import rng
from libra.resources.batches import write_batch
from libra.resources.types import Trajectory, TrajectoryId
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment, write_tokenizer
from libra.tasks.envs.hop_demo import script, sloppy

START = 1_700_000_000.0
SCRIPTED: dict[str, Any] = {
    "name": "synthetic",
    "steps": 12,
    "engine": {"kind": "scripted", "options": {"script": "libra.tasks.envs.hop_demo:sloppy"}},
    "trainer": {"kind": "scripted"},
}


def config_of(run_dir: Path, **changes: Any) -> RunConfig:
    """A small valid config."""
    return parse({**SCRIPTED, "run_dir": str(run_dir), **changes}, "test")


def make_run(run_dir: Path, steps: int = 12, finish: bool = True, groups: int = 4, members: int = 4) -> RunFolder:
    """A run of ``steps`` steps whose policy gets better; ``finish=False``: killed before its last evaluation."""
    config = config_of(run_dir, steps=steps, batch_groups=groups, algorithm={"group_size": members})
    folder = RunFolder.create(run_dir, to_plain(config))
    write_tokenizer(folder.tokenizer / "tokenizer.json")
    environment = HopEnvironment(EnvironmentConfig(), str(folder.tokenizer / "tokenizer.json"), seed=0)
    view = View(run_dir)
    view.monitor.__init__(START)  # type: ignore[misc]  # the clock of the events below
    now = START
    view.emit(happened.RunStarted(now, config.name, str(run_dir), steps))
    view.emit(happened.WaitStarted(now, "start", "train", "start", "roles", "workers"))
    now += 8
    view.emit(happened.WaitEnded(now, "start"))
    view.emit(happened.EvalFinished(now, 0, "before", 0.4, 64, 0, 3.0))
    for version in range(steps):
        now = _step(view, folder, environment, version, steps, (groups, members), now)
    if finish:
        view.emit(happened.EvalFinished(now + 4, steps, "after", 0.84, 64, 1, 4.0))
        view.emit(happened.RunEnded(now + 5, "finished"))
        view.close()
    return folder


def _step(
    view: View, folder: RunFolder, environment: HopEnvironment, version: int, steps: int, size: tuple[int, int],
    now: float,
) -> float:  # fmt: skip
    groups, members = size
    skill = version / steps
    batch = []
    view.emit(happened.WaitStarted(now, "batch", "train", "batch", "4 groups", "rollouts"))
    view.emit(happened.InFlight(now, {"rollout": groups * members, "tool": 1, "train": 0}))
    for group in range(groups):
        for member in range(members):
            name = TrajectoryId("train", version * groups + group, member)
            one = play(environment, name, max(version - (group == 0), 0), skill, now)
            batch.append(one)
            view.emit(_ended(one, now + 2))
        view.emit(happened.Moved(now + 2, "load", 1000, 2_000_000, 0.25))
        view.emit(happened.KVRefused(now + 2, {"version": 2}))
        view.emit(happened.GroupFinished(now + 2, version * groups + group, members, members, "usable"))
    if version % 5 == 4:
        view.emit(happened.GroupFinished(now + 2, 900 + version, members, members, "skipped"))
        view.emit(happened.Failed(now + 2, "infra", f"g{version}m0", "engine said: out of slots", retried=True))
    view.emit(happened.InFlight(now + 3, {"rollout": 0, "tool": 0}))
    view.emit(happened.WaitStarted(now + 3, "admission", "rollout", "admission", "room", "train"))
    view.emit(happened.WaitEnded(now + 3, "batch"))
    view.emit(happened.InFlight(now + 3, {"train": 1}))
    write_batch(folder.batch(version), batch, {"version": version, "run": "synthetic"})
    measures = {
        "loss": 0.1 - 0.01 * version, "entropy": 1.2 - 0.9 * skill, "grad_norm": 0.8 + 0.2 * np.sin(version),
        "clip_share": 0.01 + 0.01 * np.cos(version), "logprob_gap_mean": 1e-6, "logprob_gap_max": 9e-6, "seconds": 1.5,
    }  # fmt: skip
    view.emit(
        happened.StepTrained(
            now + 4.5, version, groups, tuple(version - (one.oldest_version or 0) for one in batch),
            tuple(one.length for one in batch), tuple(one.reward or 0.0 for one in batch),
            sum(one.sampled for one in batch), measures,
        )
    )  # fmt: skip
    view.emit(happened.InFlight(now + 4.5, {"train": 0}))
    view.emit(happened.WaitEnded(now + 4.5, "admission"))
    view.emit(happened.Published(now + 5, version + 1, 0.4))
    return now + 5


def play(environment: HopEnvironment, name: TrajectoryId, version: int, skill: float, now: float) -> Trajectory:
    """One trajectory of hop by the competent player with probability ``skill``, else by the sloppy one."""
    player = script if rng.generator(7, str(name)).random() < skill else sloppy
    task = environment.task(name.stream, name.group)
    session = environment.open(task, str(name), environment.seed)
    prompt = environment.reset(task)
    parts, masks, tools = [prompt], [np.zeros(len(prompt), np.int8)], []
    end = "turns"
    for turn in range(20):
        context = np.concatenate(parts)
        said = player(str(name), context, rng.stream(3, str(name), turn))
        parts.append(said)
        masks.append(np.ones(len(said), np.int8))
        action = environment.parse(said, finished=bool(said[-1] in environment.stop))
        if action.kind == "final":
            end = action.end
            break
        tools.append(asyncio.run(session.tool(turn, action.call)))
        parts.append(tools[-1].payload)
        masks.append(np.zeros(len(tools[-1].payload), np.int8))
    tokens, mask = np.concatenate(parts).astype(np.int32), np.concatenate(masks)
    values: dict[str, Any] = {
        "id": name, "prompt": name.group, "epoch": 0, "task": task, "prompt_tokens": len(prompt), "tokens": tokens,
        "mask": mask, "logprobs": np.where(mask == 1, -0.5, 0).astype(np.float32),
        "versions": np.where(mask == 1, version, -1).astype(np.int32), "tools": tuple(tools), "turns": len(tools) + 1,
        "end": end, "started": now, "ended": now + 2, "generate_seconds": 1.5, "tool_seconds": 0.1,
    }  # fmt: skip
    return Trajectory(**values, reward=environment.reward(task, Trajectory(**values, reward=None)))


def _ended(one: Trajectory, now: float) -> happened.TrajectoryEnded:
    return happened.TrajectoryEnded(
        now, str(one.id), "train", one.length, one.sampled, one.turns, one.end, one.reward, 2.0, 1.5, 0.1
    )
