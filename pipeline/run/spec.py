"""From the config to what the cluster is told, and the tokenizer that every process of the run reads."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from libra.pipeline.config import RunConfig
from libra.resources.durable import write_file
from libra.resources.errors import ConfigError
from libra.resources.types.run import RunSpec
from libra.tasks.envs.base import Environment

TOKENIZER = "tokenizer.json"


def make_spec(config: RunConfig, tokenizer: Path, folder: Path) -> RunSpec:
    """The spec of a new claim: its ``run`` is fresh, so no key of an earlier attempt is ever used again."""
    return RunSpec(
        run=secrets.token_hex(4),
        name=config.name,
        run_dir=str(folder.absolute()),
        seed=config.seed,
        eval_seed=config.eval.seed,
        deterministic=config.deterministic,
        engine=config.engine.model_dump(mode="json"),
        trainer=config.trainer.model_dump(mode="json"),
        algorithm=config.algorithm.model_dump(mode="json"),
        environment=config.environment.model_dump(mode="json"),
        policy=config.policy.options(),
        learn_from=[str(Path(name).absolute()) for name in config.policy.learn_from],
        learn_keep=config.policy.learn_keep,
        planner=config.planner.model_dump(mode="json") if config.planner.enabled else {},
        tokenizer=str(tokenizer.absolute()),
        buckets=[[b.tp, b.max_context, b.instances] for b in config.buckets],
        roles={str(role): count for role, count in config.workers.items()},
        temperature=config.algorithm.temperature,
        eval_temperature=config.eval.temperature,
        max_turn_tokens=config.environment.max_turn_tokens,
        max_context=config.engine.max_context,
        bind_seconds=config.deadlines.bind,
        start_seconds=config.deadlines.start,
        load_seconds=config.deadlines.load,
        stop_seconds=config.deadlines.stop,
    )


def check_inline(config: RunConfig, environment: Environment) -> None:
    """`ConfigError` if the tools of ``environment`` shall run inline but its sessions cannot move with a trajectory."""
    if config.environment.inline and not environment.replayable:
        raise ConfigError(
            f"environment.inline = true but {type(environment).__name__} is not replayable: a session on a rollout "
            "worker is rebuilt wherever its trajectory goes on; use environment.inline = false"
        )


def make_tokenizer_file(config: RunConfig, environment: type[Environment], folder: Path) -> Path:
    """The run's ``tokenizer.json`` under ``folder``: the configured one, the one beside ``trainer.model``, or the
    environment's own. `ConfigError` if a named one is missing."""
    target = folder / TOKENIZER
    if target.exists():
        return target
    if config.tokenizer is None and config.trainer.model is None:
        write_file(target, environment.make_tokenizer().encode())
        return target
    source = config.tokenizer or Path(str(config.trainer.model)) / TOKENIZER
    if not source.is_file():
        key = "tokenizer" if config.tokenizer else "trainer.model"
        raise ConfigError(
            f"{key}: there is no tokenizer at {source}; name a tokenizer.json, or a directory that has one"
        )
    shutil.copyfile(source, target)
    return target
