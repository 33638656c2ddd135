"""The config of a run: composes the rooms' own configs and checks what only holds between them.

Invariants: a `RunConfig` that exists is consistent (every pair of keys that must agree does); it is frozen; and
``parse(to_yaml(config)) == config``. Every error of a config is reported at once, as one `ConfigError`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources as package_data
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from libra.pipeline.config_checks import cross_check
from libra.pipeline.config_yaml import dump, parse_mapping, plain
from libra.pipeline.overrides import apply_overrides
from libra.resources.config import Bytes, Config, Seconds
from libra.resources.config_errors import did_you_mean, explain
from libra.resources.errors import ConfigError
from libra.resources.tags import Role
from libra.scheduler_plugin.planner.online import OnlineConfig
from libra.tasks.algorithms.base import AlgorithmConfig
from libra.tasks.engines.base import EngineConfig
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.trainers.base import TrainerConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("a name has 1 to 64 letters, digits, '.', '_' or '-', and begins with a letter or digit")
    return value


Positive = Annotated[Seconds, Field(gt=0, allow_inf_nan=False)]
"""A duration above zero: every wait has an end."""


class BucketConfig(Config):
    """A class of rollout instances: contexts up to ``max_context`` tokens at one TP degree."""

    tp: Literal[1, 2, 4, 8] = 1
    """Tensor-parallel degree: vLLM's; a label to the other engines."""
    max_context: int | None = Field(default=None, ge=1)
    """Longest context in tokens that it serves; None (last bucket only): up to ``engine.max_context``."""
    instances: int = Field(default=1, ge=1)
    """Engines that serve it."""


class PolicyConfig(Config):
    """How a continuation finds its bucket. Other keys are the policy's own options, which it checks."""

    model_config = ConfigDict(extra="allow")

    kind: str = "context_bounds"
    """``context_bounds`` (by context against the buckets' bounds; least loaded and sticky within a bucket), ``cmlfq``,
    ``least_loaded``, ``mlfq``, ``length_threshold``, ``embedding_like``, ``oracle`` (replays only), or the import path
    of a `BucketPolicy`."""
    learn_from: list[str] = Field(default_factory=list)
    """``policy.bin`` files of other runs: what their policies of the same kind had learned."""
    learn_keep: float = Field(default=0.5, ge=0, le=1)
    """What that evidence is worth here: 1 as much as this run's own."""

    def options(self) -> dict[str, Any]:
        """``kind`` and the policy's own options."""
        return self.model_dump(mode="json", exclude={"learn_from", "learn_keep"})


class StalenessConfig(Config):
    """How far training may run ahead of what it trains on."""

    alpha: int = Field(default=1, ge=0)
    """Versions between the oldest sampled token of a trajectory and the trained version, at most; 0: synchronous."""
    deadline: Positive = 120.0
    """How long the trainer waits for a group that is due in its batch."""
    on_expiry: Literal["fail", "drop"] = "drop"
    """What happens to a due group past the deadline: the run fails, or the group is dropped and counted."""


class GroupsConfig(Config):
    """What becomes of a group with failed members."""

    partial: Literal["min_usable", "require_full"] = "min_usable"
    """``min_usable``: train on the members that have a reward if they are at least ``algorithm.min_usable``;
    ``require_full``: drop the group if any member failed."""
    max_returned: int = Field(default=500, ge=1)
    """Groups in a row without anything to learn from (equal rewards, too few rewards) that stop the run."""


class RetriesConfig(Config):
    """How often an infrastructure failure is tried again."""

    infra: int = Field(default=3, ge=0)
    """Retries of one trajectory."""
    consecutive_infra: int = Field(default=50, ge=1)
    """Infrastructure failures in a row, over the whole run, that stop it once a trajectory has used up its retries."""
    restarts: int = Field(default=5, ge=0)
    """Failures in a row of one worker's role (its engine died, did not start …) that it is started again after."""
    backoff: Positive = 0.5
    """Wait before the first of these restarts; doubled each time."""
    backoff_most: Positive = 30.0
    """Longest of these waits."""


class EvalConfig(Config):
    """The held-out evaluation: a fixed set, sampled once a task."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    tasks: int = Field(default=256, ge=0)
    """Held-out tasks; 0: no evaluation."""
    seed: int = Field(default=1234, ge=0)
    """Names the randomness of the evaluation, the same at every version."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)


class WorkersConfig(Config):
    """Dask workers of each role."""

    rollout: int = Field(default=1, ge=1)
    tool: int = Field(default=1, ge=0)
    """None are started where tools are inline."""
    reward: int = Field(default=1, ge=1)
    train: int = Field(default=1, ge=1)


class ClusterConfig(Config):
    """The Dask cluster: a local one of this run, or a running one at ``scheduler``."""

    host: str = "127.0.0.1"
    """Address that everything binds to."""
    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    rollout_slots: int = Field(default=512, ge=1)
    """Rollout tasks that one rollout worker holds at once."""
    tool_slots: int = Field(default=64, ge=1)
    """Tool calls that one tool worker runs at once."""
    scheduler: str | None = None
    """``tcp://host:port`` of a running scheduler with the preload; None: start a local cluster."""
    dashboard: bool = True


class DriverConfig(Config):
    """How the driver submits the step graph."""

    window: Positive = 0.01
    """Submissions within this time travel as one graph."""
    max_inflight: int = Field(default=8192, ge=1)
    """Tasks in the cluster at most; later ones wait in the driver."""
    public_api: bool = False
    """Use Dask's public API only: slower. Taken anyway with a version of Dask that the fast way was not tested with."""


class StoreConfig(Config):
    """Journal, buffer and checkpoints."""

    journal_sync: Positive = 1.0
    """Longest time between a segment's end and its fsync."""
    buffer: Bytes = Field(default=2**30, gt=0)
    """Bytes of finished but untrained trajectories in memory; above it admission waits."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints (the last step makes one too)."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""


class DeadlinesConfig(Config):
    """How long each wait may last; its expiry names what was waited for and who should have unblocked it."""

    start: Positive = 120.0
    """A role: from its start to ready."""
    initialise: Positive = 900.0
    """The trainer: version 0, cold start included."""
    load: Positive = 60.0
    """An engine: loading a published version."""
    bind: Positive = 30.0
    """A continuation: from runnable to bound."""
    train: Positive = 600.0
    """One optimizer step."""
    publish: Positive = 120.0
    """Writing the weights, until every engine has them."""
    eval: Positive = 600.0
    """One evaluation."""
    step: Positive = 900.0
    """The run: without any finished segment, reward or step."""
    drain: Positive = 60.0
    """A worker that changes its role: until what runs on it has ended, or was cut short and goes on elsewhere."""
    stop: Positive = 15.0
    """Ending roles and processes."""


class RunConfig(Config):
    """Everything a run needs to know."""

    name: Annotated[str, AfterValidator(_name)] = "run"
    run_dir: Path
    """The run's folder; ``runs/<name>`` when not given."""
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=40, ge=1)
    """Optimizer steps."""
    batch_groups: int = Field(default=8, ge=1)
    """Groups of one batch."""
    deterministic: bool = False
    """Bit for bit reproducible, at α = 0 and with one rollout instance."""
    tokenizer: Path | None = None
    """A ``tokenizer.json``; None: the one beside ``trainer.model``, else the environment's own."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    buckets: tuple[BucketConfig, ...] = Field(default=(BucketConfig(),), min_length=1)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    planner: OnlineConfig = Field(default_factory=OnlineConfig)
    staleness: StalenessConfig = Field(default_factory=StalenessConfig)
    groups: GroupsConfig = Field(default_factory=GroupsConfig)
    retries: RetriesConfig = Field(default_factory=RetriesConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    driver: DriverConfig = Field(default_factory=DriverConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)

    @model_validator(mode="before")
    @classmethod
    def _default_run_dir(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("run_dir") is None:
            return {**data, "run_dir": f"runs/{data.get('name', 'run')}"}
        return data

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if problems := cross_check(self):
            raise PydanticCustomError("cross_check", "{problems}", {"problems": problems})
        return self

    @property
    def workers(self) -> dict[Role, int]:
        """Dask workers that the run needs, by role."""
        wanted, inline = self.cluster.workers, self.environment.inline
        tools = 0 if inline else wanted.tool
        return {"rollout": wanted.rollout, "tool": tools, "reward": wanted.reward, "train": wanted.train}

    @property
    def degrees(self) -> list[int]:
        """The TP degree of each rollout instance, in the order of the buckets."""
        return [bucket.tp for bucket in self.buckets for _ in range(bucket.instances)]

    @property
    def group_size(self) -> int:
        """Members of one group."""
        return self.algorithm.group_size


def parse(data: dict[str, Any], source: str, overridden: Sequence[str] = ()) -> RunConfig:
    """Validate a plain dict. ``source`` names it in errors; ``overridden`` are the dotted keys set by overrides.

    Raises `ConfigError` with every error at once: dotted key, value, and what would do.
    """
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, source, overridden)) from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, or a shipped config by its name (``quickstart``), and apply overrides (``algorithm.lr=1e-3``).

    Raises `ConfigError` when the file is missing or no YAML mapping, or for anything that `parse` refuses.
    """
    source, text = read_source(path)
    data = parse_mapping(text, source)
    overridden = apply_overrides(data, overrides)
    return parse(data, source, overridden)


def read_source(path: str | Path) -> tuple[str, str]:
    """What to call a config in messages, and its text: the file at ``path``, else the shipped config of that name."""
    file = Path(path)
    if file.is_file():
        try:
            return str(path), file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the config {path}: {error}") from None
    name = file.name.removesuffix(".yaml")
    if file.parent in (Path(), Path("conf")) and name in shipped():
        return f"{name} (shipped)", (package_data.files("libra.conf") / f"{name}.yaml").read_text(encoding="utf-8")
    raise ConfigError(
        f"there is no config {str(path)!r}; give the path of a YAML file, or the name of a shipped one: "
        f"{', '.join(shipped())}{did_you_mean(name, shipped())}"
    )


def shipped() -> list[str]:
    """Names of the configs that come with the package."""
    files = package_data.files("libra.conf").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def to_yaml(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal config; durations and sizes with units."""
    return dump(config)


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain values (JSON types)."""
    result: dict[str, Any] = plain(config)
    return result
