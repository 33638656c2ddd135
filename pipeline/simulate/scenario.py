"""What is simulated: a model on a cluster, a workload, and the policies to compare, as a YAML file.

Invariant: a scenario and a seed determine every figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import ConfigDict, Field, model_validator

from libra.pipeline.simulate.workload import WorkloadConfig
from libra.resources.config import Config
from libra.resources.specs import files
from libra.scheduler_plugin.planner.replan import ReplanConfig

VariantName = Literal[
    "colocated",
    "static_uniform",
    "greedy",
    "static_optimal",
    "homogeneous",
    "planner",
    "heterogeneous",
    "cmlfq",
    "elastic",
    "oracle",
]
VARIANTS: tuple[VariantName, ...] = get_args(VariantName)


class Scenario(Config):
    """See conf/sim."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: str
    model: str = "Qwen3-14B"
    cluster: str = "a800_48"
    profile: str | None = None
    """A profile that replaces derived rollout costs."""
    trainer: str = "megatron"
    steps: int = Field(default=12, ge=2)
    groups: int = Field(default=32, ge=1)
    """Groups of a batch."""
    members: int = Field(default=16, ge=1)
    redundant: int = Field(default=0, ge=0)
    """More members that are sampled and cancelled when enough have finished."""
    alpha: int = Field(default=1, ge=0)
    """Staleness bound; colocated runs have 0."""
    slots: int = Field(default=256, ge=1)
    uniform_tp: int = Field(default=8, ge=1)
    """TP degree of the static uniform layout."""
    failure: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a tool call fails its environment; the trajectory starts over."""
    retries: int = Field(default=3, ge=0)
    """Times that a trajectory starts over before it has failed."""
    min_usable: int = Field(default=1, ge=1)
    """Members that must finish for their group to be trained on; one with fewer is discarded and another admitted."""
    activation_seconds: float = Field(default=10.8, ge=0)
    """Published: activation of an engine."""
    join_seconds: float = Field(default=8.0, ge=0)
    """Published: background snapshot 3.6 s and restore 4.4 s."""
    stop_seconds: float = Field(default=0.0, ge=0)
    """Until an engine or a training rank that gives up its devices has ended."""
    switch_seconds: float = Field(default=10.8, ge=0)
    """Colocated: of one change between training and rollout, two a step; published: activation of an engine."""
    install_seconds: float = Field(default=0.0, ge=0)
    """From an update until engines may load its weights (they are written and published); loading them comes on top."""
    rescore: int = Field(default=12, ge=0)
    """First plans that are simulated to choose among them; 0: the closed form's choice is taken."""
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    replan: ReplanConfig = Field(default_factory=ReplanConfig)
    variants: tuple[VariantName, ...] = Field(default=VARIANTS, min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2), min_length=1)

    @model_validator(mode="after")
    def _usable(self) -> Self:
        most = self.members + self.redundant
        if self.min_usable > most:
            raise ValueError(
                f"min_usable {self.min_usable} is more than a group has ({self.members} members + {self.redundant} "
                "redundant): no group could be trained on"
            )
        return self


def load_scenario(name: str | Path) -> Scenario:
    """A shipped scenario by name, or one from a YAML file. Raises `ConfigError`."""
    source, data = files.read(name, "sim", "scenario")
    return files.parse(Scenario, data, source)
