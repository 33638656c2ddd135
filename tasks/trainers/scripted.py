"""The trainer without a model: a small array that remembers what it was trained on.

For the invariants of a run: versions, published and checkpoint files are real. Invariant: the weights are a function of
the initial seed and of the sequence of batches alone, where a batch counts as its rows' (prompt, member, length); two
runs that trained the same rows in the same order hold the same bits, and any difference shows.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from libra.resources import rng
from libra.resources.batches import BatchReader
from libra.resources.config import Config, Seconds
from libra.resources.config_errors import checked_options
from libra.resources.errors import StoreError
from libra.resources.types import Trajectory, WeightVersion
from libra.resources.weights import publish_weights
from libra.tasks.algorithms.base import AlgorithmConfig
from libra.tasks.envs.base import Environment
from libra.tasks.trainers.base import BatchRef, Progress, Trainer, TrainerConfig

WEIGHTS = 8
"""Length of the array."""
_WEIGHTS_FILE = "model.safetensors"
_STATE_FILE = "trainer.json"
_DECAY = 0.9


class ScriptedTrainerOptions(Config):
    """Options of the kind ``scripted``."""

    train_seconds: Seconds = Field(default=0.0, ge=0)
    """How long a step takes."""


class ScriptedTrainer(Trainer):
    """``weights`` and ``momentum``, float64 arrays of shape (`WEIGHTS`,)."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        environment: Environment,
        tokenizer_path: str,
        seed: int,
        cache_dir: Path,
        deterministic: bool,
    ) -> None:
        self._options = checked_options(ScriptedTrainerOptions, "trainer.options", "scripted", config.options)
        self._lr, self._seed, self._tokenizer = algorithm.lr, seed, Path(tokenizer_path)
        self.version = -1
        self.weights = np.zeros(WEIGHTS)
        self.momentum = np.zeros(WEIGHTS)

    def initialise(self, progress: Progress) -> dict[str, Any]:
        self.version = 0
        self.weights = _directions("initial", [self._seed])[0]
        self.momentum = np.zeros(WEIGHTS)
        progress({"stage": "scripted weights made"})
        return {"source": "scripted", "seconds": 0.0}

    def train(self, batch: BatchRef) -> dict[str, float]:
        self._check_initialised()
        began = time.perf_counter()
        trajectories = BatchReader(Path(batch.path)).trajectories(batch.rows)
        if self._options.train_seconds:
            time.sleep(self._options.train_seconds)
        gradient = _gradient(trajectories)
        loss = float(self.weights @ gradient)
        self.momentum = _DECAY * self.momentum + gradient
        self.weights = self.weights - self._lr * self.momentum
        self.version += 1
        return {
            "loss": loss,
            "grad_norm": float(np.linalg.norm(gradient)),
            "entropy": 0.0,
            "clip_share": 0.0,
            "logprob_gap_mean": 0.0,
            "logprob_gap_max": 0.0,
            "loss_tokens": float(sum(trajectory.sampled for trajectory in trajectories)),
            "seconds": time.perf_counter() - began,
        }

    def publish(self, directory: Path) -> WeightVersion:
        self._check_initialised()
        return publish_weights(directory, self.version, {"weights": self.weights}, {})

    def save(self, directory: Path) -> None:
        from safetensors.numpy import save_file

        self._check_initialised()
        directory.mkdir(parents=True, exist_ok=True)
        save_file({"weights": self.weights, "momentum": self.momentum}, directory / _WEIGHTS_FILE)
        (directory / _STATE_FILE).write_text(json.dumps({"version": self.version}))
        if self._tokenizer.is_file():
            (directory / "tokenizer.json").write_bytes(self._tokenizer.read_bytes())

    def restore(self, directory: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(directory / _WEIGHTS_FILE)
            state = json.loads((directory / _STATE_FILE).read_text())
            weights, momentum, version = arrays["weights"], arrays["momentum"], int(state["version"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise StoreError(
                f"{directory} holds no whole checkpoint of the scripted trainer ({type(error).__name__}: {error}); "
                "resume from another one"
            ) from error
        self.weights, self.momentum, self.version = weights, momentum, version

    def _check_initialised(self) -> None:
        if self.version < 0:
            raise StoreError("the trainer has no weights yet: initialise it or restore a checkpoint first")


def _gradient(trajectories: list[Trajectory]) -> NDArray[np.float64]:
    """A direction for each row, weighted by its length and summed in the order given."""
    total = np.zeros(WEIGHTS)
    for t in trajectories:
        direction = _directions("row", [t.prompt, t.id.member, t.length])[0]
        total = total + t.length * direction
    return total / max(1, sum(t.length for t in trajectories))


def _directions(name: str, numbers: list[int]) -> NDArray[np.float64]:
    """Numbers in [−1, 1) named by ``numbers``, shape (1, `WEIGHTS`)."""
    streams = np.array([[rng.stream(0, name, *numbers)]], np.uint64)
    return 2.0 * rng.uniforms(streams, np.arange(WEIGHTS)[None, :]) - 1.0
