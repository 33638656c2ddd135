"""What must hold between the keys of a config.

Invariant: pure; every problem names both keys, both values and what would do, and all problems are returned at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from libra.resources.config_errors import did_you_mean
from libra.resources.kv.ownership import DEFAULT_SLOTS
from libra.resources.kv.records import Geometry
from libra.scheduler_plugin.planner.planner import PlannerConfig
from libra.tasks.engines.vllm_options import vllm_problems
from libra.tasks.registry import STAGING, Seam, kinds

if TYPE_CHECKING:
    from libra.pipeline.config import RunConfig

BYTES_PER_TOKEN = 4 + 4 + 1 + 4
"""Token id, logprob, mask and version of one buffered token."""


def cross_check(config: RunConfig) -> list[str]:
    """Every disagreement between two keys, one line each; empty if the config is consistent."""
    checks: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
        _kinds, _arena, _vllm, _sizes, _tools, _buckets, _schedule, _staleness, _buffer,
        _planner,
    )  # fmt: skip
    return [problem for check in checks for problem in check(config)]


def _kinds(config: RunConfig) -> Iterator[str]:
    named: dict[Seam, str] = {
        "engine": config.engine.kind,
        "trainer": config.trainer.kind,
        "environment": config.environment.kind,
    }
    for seam, kind in named.items():
        if ":" not in kind and kind not in kinds(seam):
            yield (
                f"{seam}.kind = {kind!r} is none of the shipped kinds ({', '.join(kinds(seam))}) and no import path "
                f"such as 'my.module:Name'{did_you_mean(kind, kinds(seam))}"
            )
    if config.trainer.model is not None and config.trainer.kind == "scripted":
        yield (
            f"trainer.model = {config.trainer.model!r} but trainer.kind = 'scripted', which trains no model: "
            "use trainer.kind = 'torch', or leave trainer.model out"
        )
    if config.trainer.kind == "scripted" and config.engine.kind in ("torch", "vllm"):
        yield (
            f"engine.kind = {config.engine.kind!r} but trainer.kind = 'scripted', which publishes no model to load: "
            "use trainer.kind = 'torch', or an engine of kind 'scripted' or 'random'"
        )


def _planner(config: RunConfig) -> Iterator[str]:
    """What a run says of itself it does not say again, differently, of its planner."""
    plain, given = PlannerConfig(), config.planner.planner
    facts = (
        ("trainer", plain.trainer, given.trainer, config.trainer.kind, "trainer.kind"),
        ("slots", plain.slots, given.slots, config.engine.slots, "engine.slots"),
        ("overlap", plain.overlap, given.overlap, config.staleness.alpha + 1, "staleness.alpha + 1"),
    )
    for key, default, value, own, where in facts:
        if value not in (default, own):
            yield f"planner.planner.{key} = {value!r} but {where} = {own!r}, which the run plans with: leave it out"


def _arena(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if engine.kv_arena and engine.kind in kinds("engine") and engine.kind not in STAGING:
        yield (
            f"engine.kv_arena = {engine.kv_arena} but engine.kind = {engine.kind!r}, which stages no KV: use "
            f"engine.kind = {' or '.join(map(repr, STAGING))}, or engine.kv_arena = 0"
        )
    if 0 < engine.kv_arena <= (tables := Geometry(DEFAULT_SLOTS, 0, 0).data):
        yield (
            f"engine.kv_arena = {engine.kv_arena} bytes, of which an arena's tables alone take {tables}: use some "
            "contexts' worth of KV more, such as 64 MiB, or 0 to stage none"
        )


def _vllm(config: RunConfig) -> Iterator[str]:
    if config.engine.kind != "vllm":
        return
    temperatures = {
        "algorithm.temperature": config.algorithm.temperature,
        "eval.temperature": config.eval.temperature,
    }
    # A checkpoint's own is looked at as it is loaded.
    taught = config.trainer.options.get("cold_start", {}) if config.trainer.model is None else {}
    yield from vllm_problems(
        config.engine,
        deterministic=config.deterministic,
        temperatures=temperatures,
        head_dim=taught.get("head_dim") if isinstance(taught, dict) else None,
    )


def _sizes(config: RunConfig) -> Iterator[str]:
    engine, environment, algorithm = config.engine, config.environment, config.algorithm
    if environment.max_turn_tokens >= engine.max_context:
        yield (
            f"environment.max_turn_tokens = {environment.max_turn_tokens} does not fit below engine.max_context = "
            f"{engine.max_context}: one turn and its prompt must fit in a context"
        )
    if config.trainer.micro_batch_tokens < engine.max_context:
        yield (
            f"trainer.micro_batch_tokens = {config.trainer.micro_batch_tokens} is below engine.max_context = "
            f"{engine.max_context}: a micro-batch must hold the longest sequence"
        )
    ranks, sequences = config.cluster.workers.train, config.batch_groups * algorithm.group_size
    if sequences % ranks:
        yield (
            f"batch_groups × algorithm.group_size = {config.batch_groups} × {algorithm.group_size} = {sequences} "
            f"sequences cannot be divided by cluster.workers.train = {ranks} ranks: "
            f"{sequences} = {sequences // ranks} × {ranks} + {sequences % ranks}"
        )
    if config.driver.max_inflight < algorithm.group_size:
        yield (
            f"driver.max_inflight = {config.driver.max_inflight} is below algorithm.group_size = "
            f"{algorithm.group_size}: not even one group could be in flight"
        )


def _tools(config: RunConfig) -> Iterator[str]:
    if config.cluster.workers.tool == 0 and not config.environment.inline:
        yield (
            "cluster.workers.tool = 0 but environment.inline = false: tools need a worker of their own, or "
            "environment.inline = true if they are cheap and safe in the rollout worker's process"
        )


def _buckets(config: RunConfig) -> Iterator[str]:
    buckets, limit = config.buckets, config.engine.max_context
    for index, bucket in enumerate(buckets):
        for earlier in range(index):
            if buckets[earlier].tp == bucket.tp:
                yield (
                    f"buckets.{earlier}.tp and buckets.{index}.tp are both {bucket.tp}: a TP degree has at most one "
                    "bucket; give one bucket more instances instead"
                )
        if bucket.max_context is None and index + 1 < len(buckets):
            yield (
                f"buckets.{index}.max_context is not given, but buckets.{index + 1} follows: only the last bucket may "
                "leave it out"
            )
        before = buckets[index - 1].max_context if index else None
        if before is not None and bucket.max_context is not None and bucket.max_context <= before:
            yield (
                f"buckets.{index}.max_context = {bucket.max_context} is not above buckets.{index - 1}.max_context = "
                f"{before}: buckets come in ascending order"
            )
        if bucket.max_context is not None and bucket.max_context > limit:
            yield (
                f"buckets.{index}.max_context = {bucket.max_context} is above engine.max_context = {limit}, which no "
                "context can exceed"
            )
    last = buckets[-1].max_context
    if last is not None and last < limit:
        yield (
            f"buckets.{len(buckets) - 1}.max_context = {last} is below engine.max_context = {limit}: no bucket would "
            "serve the contexts between them; leave the last bucket's max_context out"
        )
    instances, workers = len(config.degrees), config.cluster.workers.rollout
    if instances > workers:
        yield (
            f"buckets.*.instances sum to {instances} but cluster.workers.rollout = {workers}: each instance needs a "
            "rollout worker"
        )


def _schedule(config: RunConfig) -> Iterator[str]:
    if config.eval.every > config.steps:
        yield (
            f"eval.every = {config.eval.every} is above steps = {config.steps}: the run would never evaluate in "
            f"between; use 0 (before and after only) or at most {config.steps}"
        )
    if config.eval.every and not config.eval.tasks:
        yield f"eval.every = {config.eval.every} but eval.tasks = 0: give it tasks, or use eval.every = 0"


def _staleness(config: RunConfig) -> Iterator[str]:
    instances = len(config.degrees)
    if config.deterministic and config.staleness.alpha != 0:
        yield (
            f"deterministic = true but staleness.alpha = {config.staleness.alpha}: a run repeats bit for bit only at "
            "staleness.alpha = 0"
        )
    if config.deterministic and instances != 1:
        yield (
            f"deterministic = true but buckets.*.instances sum to {instances}: a run repeats bit for bit only with one "
            "rollout instance"
        )


def _buffer(config: RunConfig) -> Iterator[str]:
    # A batch closes from the buffer: if one batch of longest trajectories did not fit, admission would wait for ever.
    sequences = config.batch_groups * config.algorithm.group_size
    batch = sequences * config.engine.max_context * BYTES_PER_TOKEN
    if config.store.buffer < batch:
        yield (
            f"store.buffer = {config.store.buffer} bytes cannot hold one batch of {sequences} sequences of "
            f"engine.max_context = {config.engine.max_context} tokens at {BYTES_PER_TOKEN} bytes a token = {batch}"
        )
