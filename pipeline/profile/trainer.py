"""One training rank in its own process, given batches and timed.

Invariant: a batch is a committed one, read from disk as in a run; steps are numbered as in a run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from libra.pipeline.config import RunConfig
from libra.pipeline.profile.child import MeasuredChild
from libra.pipeline.profile.meter import Clock
from libra.resources.batches import write_batch
from libra.resources.types import NOT_SAMPLED, Trajectory, TrajectoryId, WeightVersion
from libra.tasks.child.parent import ChildProcess

_HOST = "libra.tasks.child.trainer_host"
_STEP_SECONDS = 600.0
MEMBERS = 4
"""Of a group of synthetic trajectories."""
PROMPT = 16
"""Tokens before the first sampled one."""


class MeasuredTrainer(MeasuredChild):
    """Make it with `start`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="batches-", dir=folder))
        self._random = np.random.default_rng(seed)
        self._batches = 0
        self.version = 0

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        tokenizer: Path,
        folder: Path,
        cache: Path,
        *,
        core: int | None = None,
        clock: Clock = "cpu",
        micro_batch_tokens: int | None = None,
    ) -> Self:
        """Start the process (pinned to ``core``) and bring up version 0. ``folder``: for logs and batches; ``cache``:
        that of cold starts. Raises what the trainer raises."""
        self = cls(folder, config.seed)
        trainer = config.trainer.model_dump(mode="json")
        if micro_batch_tokens is not None:
            trainer["micro_batch_tokens"] = micro_batch_tokens
        child = await ChildProcess.start(
            _HOST,
            {
                "trainer": trainer,
                "algorithm": config.algorithm.model_dump(mode="json"),
                "environment": config.environment.model_dump(mode="json"),
                "tokenizer": str(tokenizer),
                "seed": config.seed,
                "cache_dir": str(cache),
                "deterministic": False,
            },
            name=f"measured {config.trainer.kind} trainer",
            log=folder / "trainer.log",
            seconds=config.deadlines.start,
            threads=config.trainer.threads,
            on_event=lambda name, fields: None,
            on_exit=lambda reason: None,
        )
        async with self._own(child, core, clock):
            self.version = (await child.call("initialise", seconds=config.deadlines.initialise))["version"]
        return self

    async def publish(self, directory: Path) -> WeightVersion:
        """Write the present weights."""
        fields = {"directory": str(directory), "expected": self.version}
        return WeightVersion(**await self.child.call("publish", seconds=_STEP_SECONDS, **fields))

    def batch(self, lengths: Sequence[int], sampled: float, vocabulary: int) -> Path:
        """Commit a batch of random trajectories of these ``lengths`` in tokens, a share ``sampled`` of them loss
        tokens."""
        path = self._folder / f"batch-{self._batches}.zarr"
        self._batches += 1
        rows = [self._trajectory(i, length, sampled, vocabulary) for i, length in enumerate(lengths)]
        write_batch(path, rows, {})
        return path

    async def step(self, batch: Path, rows: int) -> float:
        """Seconds of one optimizer step."""
        began = self.read()
        fields: dict[str, Any] = {"path": str(batch), "rows": list(range(rows)), "expected": self.version}
        self.version = (await self.child.call("train", seconds=_STEP_SECONDS, **fields))["version"]
        return self.read() - began

    def _trajectory(self, place: int, length: int, sampled: float, vocabulary: int) -> Trajectory:
        length = max(length, 2)
        mask = (self._random.random(length) < sampled).astype(np.int8)
        mask[: min(PROMPT, length - 1)] = 0
        mask[-1] = 1
        group, member = divmod(place, MEMBERS)
        return Trajectory(
            id=TrajectoryId("train", group, member), prompt=group, epoch=0, task={},
            prompt_tokens=min(PROMPT, length - 1),
            tokens=self._random.integers(0, vocabulary, length).astype(np.int32), mask=mask,
            logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
            tools=(), turns=1, end="answer", reward=float(place % 2),
        )  # fmt: skip
