"""The seam of trainers: what one training rank does, in the vocabulary of the trainer host.

A trainer lives in a child process of the train worker. Invariants: ``version`` counts optimizer steps and changes in
`train` and `restore` only; `train` on the same weights, optimizer state and batch gives the same weights (bit for bit
in a deterministic run); publishing a version twice writes the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from libra.resources.config import Config
from libra.resources.launches import Launches
from libra.resources.types import WeightVersion

if TYPE_CHECKING:
    from libra.tasks.algorithms.base import AlgorithmConfig
    from libra.tasks.envs.base import Environment


class TrainerConfig(Config):
    """How training ranks run."""

    kind: str = "torch"
    """``torch``, ``scripted``, or the import path of a `Trainer`."""
    model: str | None = None
    """A HF checkpoint directory to start from (with its tokenizer); None: the environment's cold start makes one."""
    threads: int = Field(default=1, ge=1)
    """Threads of the trainer process."""
    micro_batch_tokens: int = Field(default=6144, ge=1)
    """Padded tokens of one micro-batch at most."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the kind."""


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A committed batch: the store's path and the rows to train on, in order."""

    path: str
    rows: tuple[int, ...]


Progress = Callable[[dict[str, Any]], None]
"""Called now and then with plain values that a person may want to see (cold start: step, loss, copy probability)."""


class Trainer(ABC):
    """One training rank. Not thread-safe."""

    launches: ClassVar[Launches] = Launches()
    """The strategies that it can be launched with; those of shipped kinds stand in the registry too."""
    version: int

    @abstractmethod
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
        """``cache_dir`` holds what is dear to make and may be made again (the cold start's checkpoints)."""

    @abstractmethod
    def initialise(self, progress: Progress) -> dict[str, Any]:
        """Bring up version 0: from ``model``, from the cold start's cache, or by the cold start. Returns what a log
        should hold (``source``, ``seconds``, the cold start's measures)."""

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Load what `save` wrote: weights, optimizer, RNG, version. `StoreError` names what is missing."""

    @abstractmethod
    def train(self, batch: BatchRef) -> dict[str, float]:
        """One optimizer step on the batch; ``version`` goes up by one. Returns the step's measures (``loss``,
        ``grad_norm``, ``entropy``, ``clip_share``, ``logprob_gap_mean``, ``logprob_gap_max`` over tokens of the trained
        version, ``loss_tokens``, ``seconds``)."""

    @abstractmethod
    def publish(self, directory: Path) -> WeightVersion:
        """Write the weights of ``version`` under ``directory`` (versioned, checksummed, idempotent)."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights (HF safetensors), tokenizer, optimizer, RNG and version into ``directory``."""

    def close(self) -> None:  # noqa: B027 - most trainers hold nothing that outlives their process
        """Free what outlives the process."""
