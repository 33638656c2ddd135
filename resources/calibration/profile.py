"""Profile files: measured (or published) costs with their provenance, as YAML.

Invariants: what `save_profile` writes `load_profile` reads back equal; a published profile cannot pass for a measured
one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from libra.resources.config import Config
from libra.resources.cost_model.rollout import QueueModel, RolloutCosts, StepCost
from libra.resources.cost_model.training import TrainingFactors
from libra.resources.specs import files


class Provenance(Config):
    """Where the figures come from."""

    status: Literal["measured", "published"]
    source: str
    """What was run (engine, trainer), or where it was published."""
    machine: str
    date: str
    """ISO 8601; of the measurement or of the publication."""
    versions: dict[str, str] = Field(default_factory=dict)
    grid: dict[str, list[float]] = Field(default_factory=dict)
    """Values measured, by dimension."""
    residuals: dict[str, float] = Field(default_factory=dict)
    """Mean absolute relative error, by fit; held-out where the name says so."""
    fitted: dict[str, str] = Field(default_factory=dict)
    """Of a published profile: rows that follow from published points, and from which."""
    interpolated: tuple[str, ...] = ()
    """Rows between fitted ones, without a point of their own."""
    derived: tuple[str, ...] = ()
    """Columns that come from the specs, not from the source."""
    remarks: str = ""


class StepEntry(Config):
    """Fitted costs of one TP degree; see `StepCost`."""

    tp: int = Field(ge=1)
    step_s: float = Field(ge=0)
    sequence_s: float = Field(ge=0)
    token_s: float = Field(ge=0)
    admission_s: float = Field(ge=0)
    prefill_token_s: float = Field(ge=0)
    prefill_pair_s: float = Field(ge=0)
    capacity_tokens: float = Field(gt=0)
    slots: int = Field(ge=1)


class QueueEntry(Config):
    """See `QueueModel`."""

    path: float = Field(gt=0)
    work: float = Field(gt=0)
    wave: float = Field(ge=0)
    rework: float = Field(ge=0)


class TrainEntry(Config):
    """See `TrainingFactors`."""

    linear: float = Field(ge=0)
    quadratic: float = Field(ge=0)
    constant: float = Field(ge=0)
    fixed_seconds: float = Field(ge=0)
    logprob_pass: bool = True


class ThroughputEntry(Config):
    """A published figure: tokens/s of one GPU for a batch of requests whose contexts lie in a range."""

    tp: int
    context_from: int
    context_to: int
    batch: int
    gpus: int
    tokens_per_s_per_gpu: float = Field(gt=0)


class Profile(Config):
    """Costs of one model on one kind of hardware."""

    name: str
    model: str
    hardware: str
    provenance: Provenance
    rollout: tuple[StepEntry, ...] = ()
    queue: QueueEntry | None = None
    training: TrainEntry | None = None
    throughput: tuple[ThroughputEntry, ...] = ()

    @property
    def title(self) -> str:
        """In one line: what, where, when."""
        p = self.provenance
        return f"{p.status} ({self.name}: {p.source}, {p.machine}, {p.date})"

    def rollout_costs(self) -> RolloutCosts | None:
        """The fitted costs; None when the profile has none."""
        if not self.rollout:
            return None
        steps = tuple(
            StepCost(
                e.tp, e.step_s, e.sequence_s, e.token_s, e.admission_s, e.prefill_token_s, e.prefill_pair_s,
                e.capacity_tokens, e.slots,
            )
            for e in sorted(self.rollout, key=lambda e: e.tp)
        )  # fmt: skip
        queue = QueueModel(**self.queue.model_dump()) if self.queue else QueueModel()
        return RolloutCosts(steps, queue, self.title)

    def training_factors(self) -> TrainingFactors | None:
        """The fitted factors; None when the profile has none."""
        return TrainingFactors(**self.training.model_dump()) if self.training else None


def step_entry(step: StepCost) -> StepEntry:
    """A cost as a profile holds it."""
    return StepEntry(
        tp=step.tp, step_s=step.step, sequence_s=step.sequence, token_s=step.token, admission_s=step.admission,
        prefill_token_s=step.prefill_token, prefill_pair_s=step.prefill_pair, capacity_tokens=step.capacity,
        slots=step.slots,
    )  # fmt: skip


def load_profile(name: str | Path) -> Profile:
    """A shipped profile by name, or one from a YAML file. Raises `ConfigError`."""
    source, data = files.read(name, "profiles", "profile")
    return files.parse(Profile, data, source)


def save_profile(profile: Profile, path: Path) -> None:
    """Write the profile (a temporary file, then a rename)."""
    text = yaml.safe_dump(profile.model_dump(mode="json", exclude_none=True), sort_keys=False, width=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f"# {profile.title}\n{text}", encoding="utf-8")
    temporary.replace(path)
