"""From the config to what the cluster is told."""

from __future__ import annotations

import secrets
from pathlib import Path

from libra.pipeline.config import RunConfig
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.planner.online import OnlineConfig
from libra.tasks.registry import launches_of


def planner_of(config: RunConfig) -> OnlineConfig:
    """The run's planning, with what the run itself says: its trainer and what that can launch, the slots of its
    engines, how many batches are in flight, and its last step."""
    facts = {
        "trainer": config.trainer.kind, "launches": launches_of(config.trainer.kind), "slots": config.engine.slots,
        "overlap": config.staleness.alpha + 1,
    }  # fmt: skip
    settings = config.planner.planner.model_copy(update=facts)
    return config.planner.model_copy(update={"planner": settings, "steps": config.steps})


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
        pool={
            "restarts": config.retries.restarts,
            "backoff": config.retries.backoff,
            "backoff_most": config.retries.backoff_most,
            "drain": config.deadlines.drain,
        },
        planner=planner_of(config).model_dump(mode="json") if config.planner.enabled else {},
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
