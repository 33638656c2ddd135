"""The train role, which owns a training rank's process, and the bodies of what it does.

Invariants: a batch is trained at most once, and what is published or saved as a version is that version (the key names
the version and the rank refuses any other: Dask may run a task of a lost worker again, on a new rank); a task that runs
out of its ``seconds`` raises `DeadlineError` and names the process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from libra.resources.errors import InfraError
from libra.resources.keys import TaskKey
from libra.tasks.child.parent import ChildProcess
from libra.tasks.roles import Role, Setting
from libra.tasks.running import Request, run_body
from libra.tasks.trainers.base import TrainerConfig

_HOST = "libra.tasks.child.trainer_host"


async def initialise(blob: bytes) -> None:
    """Body: bring up version 0. ``blob`` packs ``key`` and ``seconds``. Leaves the trainer's log entry and
    ``version``."""

    async def work(role: TrainRole, request: Request) -> tuple[dict[str, Any], None]:
        return await role.call("initialise", request["seconds"]), None

    await run_body(TrainRole, blob, work)


async def restore(blob: bytes) -> None:
    """Body: load the checkpoint in ``directory``. Leaves ``version``."""

    async def work(role: TrainRole, request: Request) -> tuple[dict[str, Any], None]:
        return await role.call("restore", request["seconds"], directory=request["directory"]), None

    await run_body(TrainRole, blob, work)


async def train(blob: bytes) -> None:
    """Body: one optimizer step on ``rows`` of the committed batch at ``path``. Leaves the step's measures and
    ``version``, the one after the step. The key's step is the version that the batch is for."""

    async def work(role: TrainRole, request: Request) -> tuple[dict[str, Any], None]:
        fields = {"path": request["path"], "rows": request["rows"], "expected": version_of(request)}
        return await role.call("train", request["seconds"], **fields), None

    await run_body(TrainRole, blob, work)


async def publish(blob: bytes) -> None:
    """Body: write the weights under ``directory``. Leaves ``version``, ``path`` and ``digest``. The key's step is the
    version."""

    async def work(role: TrainRole, request: Request) -> tuple[dict[str, Any], None]:
        fields = {"directory": request["directory"], "expected": version_of(request)}
        return await role.call("publish", request["seconds"], **fields), None

    await run_body(TrainRole, blob, work)


async def checkpoint(blob: bytes) -> None:
    """Body: write weights, optimizer and all else into ``directory``. Leaves ``version``, which is the key's step."""

    async def work(role: TrainRole, request: Request) -> tuple[dict[str, Any], None]:
        fields = {"directory": request["directory"], "expected": version_of(request)}
        return await role.call("save", request["seconds"], **fields), None

    await run_body(TrainRole, blob, work)


def version_of(request: Request) -> int:
    """The version that a request's key names. `InfraError` if the key is not of this system."""
    key = TaskKey.parse(request["key"])
    if key is None:
        raise InfraError(f"{request['key']!r} is no key of this system; make it with TaskKey")
    return key.step


def cache_directory() -> Path:
    """Where what is dear to make is kept between runs: ``$LIBRA_CACHE_DIR``, else ``dask-libra`` in the user's cache
    folder."""
    given = os.environ.get("LIBRA_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dask-libra"


class TrainRole(Role):
    """One training rank, in a process of its own."""

    name = "train"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._config = TrainerConfig(**self.spec.trainer)
        self._trainer: ChildProcess | None = None
        self._version: int | None = None

    async def start(self) -> None:
        spec = self.spec
        config = {
            "trainer": spec.trainer,
            "algorithm": spec.algorithm,
            "environment": spec.environment,
            "tokenizer": spec.tokenizer,
            "seed": spec.seed,
            "cache_dir": str(cache_directory()),
            "deterministic": spec.deterministic,
        }
        self._trainer = await ChildProcess.start(
            _HOST,
            config,
            name=f"trainer of {self.setting.worker}",
            log=self.setting.log("train"),
            seconds=spec.start_seconds,
            threads=self._config.threads,
            on_event=lambda name, fields: self.setting.on_progress(fields),
            on_exit=self.setting.on_lost,
        )

    async def stop(self) -> None:
        if self._trainer is not None:
            await self._trainer.stop(self.spec.stop_seconds / 2)

    async def call(self, op: str, seconds: float, **args: Any) -> dict[str, Any]:
        """What the rank answers. Raises its own error, `InfraError` if it dies, `DeadlineError`."""
        assert self._trainer is not None
        result: dict[str, Any] = await self._trainer.call(op, seconds=seconds, **args)
        self._version = result["version"]
        return result

    @property
    def version(self) -> int | None:
        return self._version

    def slots(self, threads: int) -> int:
        return 1
