"""Everything that can be checked about a run without running it.

Invariant: nothing is trained, started for good or written outside a temporary folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from libra.pipeline.checks import Check
from libra.pipeline.config import RunConfig
from libra.pipeline.run.prepare import (
    check_arenas,
    check_inline,
    check_model,
    check_policy,
    check_tokenizer,
    make_tokenizer_file,
)
from libra.pipeline.run.spec import planner_of
from libra.pipeline.run_folders import finished, has_begun, progress
from libra.pipeline.store.lock import RunLock
from libra.pipeline.store.run_folder import IDENTITY_FILE
from libra.pipeline.view.lines import count
from libra.resources.cluster.attach import attached
from libra.resources.cluster.local import PRELOAD
from libra.resources.errors import ClusterError, ConfigError, LibraError
from libra.resources.types import Stream
from libra.scheduler_plugin.planner.online import Online, WorkerDevice
from libra.scheduler_plugin.roles import Duty
from libra.tasks.envs import calls
from libra.tasks.registry import environment_class
from libra.tasks.train import cache_directory

_GIB = 2**30
_CHILD_SECONDS, _CONNECT_SECONDS = 180, 5
_DASK_PROCESS, _TORCH_PROCESS = 150 * 2**20, 500 * 2**20
"""Resident bytes of an idle Dask worker and of a process that has loaded torch and transformers, rounded up."""
_TRAIN_BYTES = 4 * 4
"""Bytes a parameter in training: weights, gradient and AdamW's two moments in float32."""


def examine_run(config: RunConfig, *, resume: bool, fresh: bool) -> list[Check]:
    """Every check of ``config``."""
    checks = [_model(config), *_cache(config), _policy(config), *_arenas(config), *_planner(config)]
    with tempfile.TemporaryDirectory(prefix="libra-dry-run-") as folder:
        try:
            environment_class(config.environment.kind)
        except ConfigError as error:
            mend = "PYTHONPATH=<the folder of its module>, or environment.kind=<one that can be imported>"
            checks.append(Check(f"environment {config.environment.kind}", "missing", str(error), mend))
        else:
            tokenizer, found = _tokenizer(config, Path(folder))
            checks += [found, _environment(config, tokenizer)]
            checks += _kinds(config, tokenizer, Path(folder))
    checks += [_run_folder(config, resume=resume, fresh=fresh), _memory(config)]
    if config.cluster.scheduler is not None:
        checks.append(_scheduler(config.cluster.scheduler))
    return checks


def _tokenizer(config: RunConfig, folder: Path) -> tuple[Path | None, Check]:
    mend = "tokenizer=<path of a tokenizer.json>"
    try:
        path = make_tokenizer_file(config, folder)
        size = check_tokenizer(path, "tokenizer")
    except LibraError as error:
        return None, Check("tokenizer", "missing", str(error), mend)
    origin = config.tokenizer or config.trainer.model or f"the environment {config.environment.kind}"
    return path, Check("tokenizer", "ok", f"{count(size)} tokens, from {origin}")


def _model(config: RunConfig) -> Check:
    if config.trainer.model is None:
        return Check("model", "ok", f"none given: the trainer ({config.trainer.kind}) makes its own")
    folder = Path(config.trainer.model)
    try:
        check_model(config)
    except ConfigError as error:
        return Check("model", "missing", str(error), "trainer.model=<a Hugging Face checkpoint directory>")
    return Check("model", "ok", f"{folder}: {count(_model_bytes(folder) / 2**20)} MiB of weights")


def _cache(config: RunConfig) -> Iterator[Check]:
    """Whether a cold start could be kept."""
    if config.trainer.kind != "torch" or config.trainer.model is not None:
        return
    cache = cache_directory()
    parent = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if parent.is_dir() and os.access(parent, os.W_OK) and os.statvfs(parent).f_bavail:
        yield Check("cold-start cache", "ok", str(cache))
    else:
        yield Check(
            "cold-start cache", "missing", f"{parent} is no writable folder", "LIBRA_CACHE_DIR=<a folder of your own>"
        )


def _policy(config: RunConfig) -> Check:
    try:
        check_policy(config)
    except ConfigError as error:
        return Check("policy", "missing", str(error))
    return Check("policy", "ok", config.policy.kind)


def _arenas(config: RunConfig) -> Iterator[Check]:
    """Whether the shared memory of this machine holds what engines stage."""
    if not config.engine.kv_arena or config.cluster.scheduler is not None:
        return
    try:
        check_arenas(config)
    except ConfigError as error:
        yield Check("KV arenas", "missing", str(error))
    else:
        yield Check("KV arenas", "ok", f"{config.engine.kv_arena / _GIB:.2f} GiB of shared memory for each instance")


def _planner(config: RunConfig) -> Iterator[Check]:
    """Whether a run that replans can: its specs, and roles that its workers can change."""
    if not config.planner.enabled:
        return
    wanted = config.cluster.workers
    duties = [Duty("rollout", tp) for tp in config.degrees] + [Duty("train")] * wanted.train
    able = config.cluster.scheduler is not None  # a local worker has one role; of others the scheduler will tell
    workers = [WorkerDevice(f"{duty.role}-{i}", "here", able, duty) for i, duty in enumerate(duties)]
    try:
        planner = Online(planner_of(config), workers).planner
    except ConfigError as error:
        yield Check("planner", "missing", str(error))
        return
    costs = planner.rollout_costs(planner.inventory.hardware[0]).provenance
    yield Check("planner", "ok", f"replans {planner.model.name} on {len(workers)} workers; costs: {costs}")


def _environment(config: RunConfig, tokenizer: Path | None) -> Check:
    """Make the environment and the first prompt of both streams."""
    name, settings = f"environment {config.environment.kind}", config.environment
    if tokenizer is None:
        return Check(name, "warn", "not made: there is no tokenizer")
    try:
        environment = calls.make_environment(settings, str(tokenizer), config.seed)
        check_inline(config, environment)
        streams: tuple[Stream, ...] = ("train", "heldout")
        calls.prompts(environment, "train")
        lengths = [len(calls.opening(environment, stream, 0)[1]) for stream in streams]
    except LibraError as error:
        return Check(name, "missing", str(error))
    room = config.engine.max_context - settings.max_turn_tokens
    if max(lengths) > room:
        detail = (
            f"a prompt of {max(lengths)} tokens and a turn of environment.max_turn_tokens = {settings.max_turn_tokens} "
            f"exceed engine.max_context = {config.engine.max_context}"
        )
        return Check(name, "missing", detail, f"engine.max_context={max(lengths) + settings.max_turn_tokens} or more")
    return Check(name, "ok", f"first prompts have {lengths[0]} (train) and {lengths[1]} (held-out) tokens")


def _kinds(config: RunConfig, tokenizer: Path | None, folder: Path) -> Iterator[Check]:
    """Build engine and trainer in a process of their own."""
    if tokenizer is None:
        return
    arguments: dict[str, Any] = {
        "engine": config.engine.model_dump(mode="json"),
        "trainer": config.trainer.model_dump(mode="json"),
        "algorithm": config.algorithm.model_dump(mode="json"),
        "environment": config.environment.model_dump(mode="json"),
        "tokenizer": str(tokenizer),
        "seed": config.seed,
        "cache_dir": str(folder),
        "deterministic": config.deterministic,
    }
    command = [sys.executable, "-m", "libra.pipeline.dry_run_kinds"]
    try:
        done = subprocess.run(
            command, input=json.dumps(arguments), capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield Check("engine and trainer", "missing", f"not built within {_CHILD_SECONDS} s")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Check("engine and trainer", "missing", f"cannot be built: {last}", "libra doctor")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    for seam, kind in (("engine", config.engine.kind), ("trainer", config.trainer.kind)):
        error = found[seam]
        yield Check(f"{seam} {kind}", "missing" if error else "ok", error or "can be built")


def _run_folder(config: RunConfig, *, resume: bool, fresh: bool) -> Check:
    path = config.run_dir
    if (path / IDENTITY_FILE).is_file():
        if (holder := RunLock.holder(path)) is not None:
            mend = "wait for it to end, end it, or name=<another>"
            return Check("run folder", "missing", f"{path} is in use by {holder}", mend)
        what = "a finished run" if finished(path) else f"an unfinished run ({progress(path)})"
        if resume:
            return Check("run folder", "ok", f"{path} holds {what}: --resume goes on with it")
        if not has_begun(path):
            return Check("run folder", "ok", f"{path} holds a run that never began, which would be moved aside")
        if fresh or finished(path):
            return Check("run folder", "ok", f"{path} holds {what}, which would be moved aside")
        return Check("run folder", "missing", f"{path} holds {what}", "--resume, --fresh, or name=<another>")
    if resume:
        return Check("run folder", "missing", f"there is no run to resume in {path}", "leave --resume out")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        return Check("run folder", "missing", f"{path} is there and is no run folder", "run_dir=<a new folder>")
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        return Check("run folder", "missing", f"{parent} is no writable folder", "run_dir=<a folder of your own>")
    free = shutil.disk_usage(parent).free / _GIB
    return Check("run folder", "ok" if free >= 1 else "warn", f"{path} can be made; {free:.0f} GiB free")


def _memory(config: RunConfig) -> Check:
    """Processes, weights, optimizer and the trajectory buffer, against what is available now."""
    workers, torch = config.cluster.workers, (config.engine.kind, config.trainer.kind)
    dask = 2 + sum(config.workers.values())
    children = workers.rollout * (torch[0] == "torch") + workers.train * (torch[1] == "torch")
    if torch[0] == "vllm":  # an engine is its host, its core, and its ranks
        children += sum(2 + tp for tp in config.degrees)
    needed = dask * _DASK_PROCESS + children * _TORCH_PROCESS + min(config.store.buffer, _buffer_bytes(config))
    if config.trainer.model is not None and Path(config.trainer.model).is_dir():
        weights = _model_bytes(Path(config.trainer.model))
        needed += weights * workers.rollout + weights * _TRAIN_BYTES // 4 * workers.train
    available = psutil.virtual_memory().available
    detail = f"about {needed / _GIB:.1f} GiB without caches and activations; {available / _GIB:.1f} GiB available"
    if config.cluster.scheduler is not None:
        return Check("memory", "ok", f"{detail} here; the workers are elsewhere")
    return Check("memory", "ok" if needed < available else "warn", detail)


def _buffer_bytes(config: RunConfig) -> int:
    """Trajectories that α lets wait untrained, at their longest, 13 bytes a token."""
    groups = (config.staleness.alpha + 1) * config.batch_groups
    return groups * config.group_size * config.engine.max_context * 13


def _model_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _scheduler(address: str) -> Check:
    """Whether a scheduler with the plugin answers there."""
    try:
        workers = asyncio.run(_workers(address))
    except ClusterError as error:
        return Check("scheduler", "missing", str(error), f"dask scheduler --preload {PRELOAD}")
    return Check("scheduler", "ok", f"{address} has the plugin and {workers} workers")


async def _workers(address: str) -> int:
    async with attached(address, _CONNECT_SECONDS) as client:
        return len((await client.scheduler.identity())["workers"])
