"""What every algorithm's config holds, and advantages. No torch: the driver and the reports use this too.

Invariants: pure functions; a group is judged over the members that have rewards, however many those are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from libra.resources.config import Config

STD_EPS = 1e-6
"""Added to a group's standard deviation."""


class AlgorithmConfig(Config):
    """The loss, the optimizer, and how groups are judged."""

    kind: Literal["grpo"] = "grpo"
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The probability ratio counts from 1 − ``clip_low`` …"""
    clip_high: float = Field(default=0.28, ge=0)
    """… to 1 + ``clip_high``."""
    group_size: int = Field(default=8, ge=2)
    """Members (trajectories) of one prompt."""
    min_usable: int = Field(default=2, ge=2)
    """A group with fewer rewarded members is discarded."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the distribution that training rollouts are sampled from and that the loss is taken on."""

    @model_validator(mode="after")
    def _groups_can_be_usable(self) -> Self:
        if self.min_usable > self.group_size:
            raise ValueError(f"min_usable is {self.min_usable}, but a group has {self.group_size} members (group_size)")
        return self


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether the members' rewards differ; a group without spread has no gradient."""
    return max(rewards) > min(rewards)


def group_advantages(rewards: Sequence[float]) -> NDArray[np.float64]:
    """GRPO's advantages of one group, shape (n,): (r − mean) / (std + 1e-6) with the biased standard deviation, over
    the members given (Shao et al. 2024, DeepSeekMath, §4.1.2). Zero for a group without spread."""
    r = np.asarray(rewards, np.float64)
    return (r - r.mean()) / (r.std() + STD_EPS)
