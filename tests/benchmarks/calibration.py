"""How well measured costs predict: decode steps and training steps that the fit did not see, and whole iterations of
twelve small configs, engine and trainer side by side in their own processes, pinned to a core each.

Steps are CPU seconds of the process, medians of 5. An iteration's rollout is timed by a clock that stands still while
the engine is ready to run and another process has its core, so that a busy machine does not count as a slow engine.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.rows import Row, Rows
from libra.pipeline.config import RunConfig, load_config
from libra.pipeline.profile.engine import Ask, MeasuredEngine
from libra.pipeline.profile.measure import Subject, default_grid, measure, measure_engine, step_seconds
from libra.pipeline.profile.trainer import MeasuredTrainer
from libra.resources.calibration import Profile, fit_rollout
from libra.resources.cost_model import Requests, RolloutCosts, TrainingCosts
from libra.resources.cost_model.rollout import set_seconds
from libra.resources.specs import ModelSpec, load_hardware
from libra.resources.types import Bucket, ToolState, TrainStrategy
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.simulation import Engine, Moves, RolloutSimulation, Trace, Turn

AIM_STEP, AIM_TRAIN, AIM_WHOLE, PUBLISHED_WHOLE = 10.0, 10.0, 15.0, 6.35
REPEATS = 5
SAMPLED = 0.5
_COLD = {
    "batch": 3, "drill_steps": 1, "mixed_steps": 1, "decay_steps": 1, "gate": 1e-9, "required_copy": 1e-9,
    "max_steps": 3,
}  # fmt: skip
"""A cold start that teaches nothing: times do not depend on what a model has learned."""
MODELS = {
    "small": {"hidden_size": 128, "layers": 2},
    "wide": {"hidden_size": 192, "intermediate_size": 384, "layers": 3},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One config: ``requests`` trajectories of up to ``turns`` turns, typically ``generated`` tokens and a payload of
    ``payload`` tokens after ``tool_seconds``; ``slots`` of the engine; ``prompt`` tokens."""

    model: str
    requests: int
    slots: int
    prompt: int
    turns: int
    generated: int
    payload: int
    tool_seconds: float


CASES = (
    Case("small", 16, 48, 24, 3, 24, 12, 0.02),
    Case("small", 64, 48, 24, 4, 24, 12, 0.02),
    Case("small", 24, 48, 64, 1, 200, 0, 0.0),
    Case("small", 48, 48, 160, 2, 40, 60, 0.05),
    Case("small", 8, 48, 48, 6, 40, 24, 0.20),
    Case("small", 32, 48, 16, 8, 12, 24, 0.05),
    Case("wide", 12, 48, 24, 3, 24, 12, 0.02),
    Case("wide", 56, 48, 24, 3, 16, 12, 0.02),
    Case("wide", 16, 48, 64, 1, 150, 0, 0.0),
    Case("wide", 24, 48, 120, 2, 30, 40, 0.05),
    Case("wide", 6, 48, 48, 6, 40, 24, 0.20),
    Case("wide", 40, 48, 16, 5, 12, 16, 0.01),
)


def config_of(model: str) -> RunConfig:
    """The quick start with another size of model, untaught."""
    plain = load_config("quickstart")
    options = {"cold_start": {**_COLD, **MODELS[model]}}
    trainer = plain.trainer.model_copy(update={"options": options, "micro_batch_tokens": 1024})
    engine = plain.engine.model_copy(update={"slots": 48, "max_context": 640})
    return plain.model_copy(update={"name": f"bench_{model}", "trainer": trainer, "engine": engine})


def traces_of(case: Case, seed: int) -> list[Trace]:
    """What the trajectories of a case do; lengths with a tail."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(case.requests):
        turns, room, chain = int(random.integers(1, case.turns + 1)), 600 - case.prompt, []
        for turn in range(turns):
            generated = int(np.clip(case.generated * random.lognormal(0, 0.5), 2, max(2, room // 2)))
            last = turn == turns - 1
            payload = 0 if last else int(np.clip(case.payload * random.lognormal(0, 0.3), 1, max(1, room // 4)))
            room -= generated + payload
            waits = 0.0 if last else float(case.tool_seconds * random.lognormal(0, 0.5))
            chain.append(Turn(generated, None if last else ToolState("tool", 0, "ok"), payload, waits))
        found.append(Trace(f"p{i}e0m0", case.prompt, tuple(chain)))
    return found


class Stage:
    """The clock of an iteration: of the wall, but it stands still while the engine is ready to run and another process
    has its core. Tools take their time by it too."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/schedstat")

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter() - int(self._path.read_text().split()[1]) / 1e9

    async def pass_by(self, seconds: float) -> None:
        """Wait until ``seconds`` have passed."""
        until = self.now() + seconds
        while (left := until - self.now()) > 0:
            await asyncio.sleep(left)


async def rolled_out(engine: MeasuredEngine, traces: Sequence[Trace]) -> float:
    """Seconds until all trajectories have ended."""
    stage = Stage(engine.child.pid)

    async def one(trace: Trace) -> None:
        context = engine.tokens(trace.prompt_tokens)
        for turn in trace.turns:
            sampled = await engine.generate(Ask(trace.name, context, turn.generated))
            await stage.pass_by(turn.seconds)
            context = np.concatenate([context, sampled, engine.tokens(turn.payload)])
        engine.release([trace.name])

    began = stage.now()
    await asyncio.gather(*(one(trace) for trace in traces))
    return stage.now() - began


def simulated(costs: RolloutCosts, traces: Sequence[Trace]) -> float:
    """Virtual seconds of the same rollout."""
    step = costs.of(1)
    simulation = RolloutSimulation(
        [Engine("e", "n", step)], [Bucket(1, None)], LeastLoaded({}), Moves(0.0, 1.0, 1.0, shared=False)
    )
    for trace in traces:
        simulation.submit(trace)
    while simulation.step() is not None:
        pass
    return simulation.now


@dataclass(slots=True)
class Errors:
    """Relative errors, each of one prediction."""

    step: list[float]
    train: list[float]
    closed: list[float]
    whole: list[float]


class Bench:
    """One model: its profile, and predictions beside measurements."""

    def __init__(self, subject: Subject, model: ModelSpec, profile: Profile) -> None:
        self.subject, self.model = subject, model
        costs, factors = profile.rollout_costs(), profile.training_factors()
        assert costs is not None
        assert factors is not None
        self.costs, self.factors = costs, factors

    def train_seconds(self, lengths: Sequence[int]) -> float:
        """Predicted seconds of an optimizer step (publishing left out)."""
        micro = max(1, int(self.subject.config.trainer.micro_batch_tokens // max(1.0, fmean(lengths))))
        costs = TrainingCosts(self.model, self.subject.hardware, np.array(lengths, float), self.factors)
        predicted = costs.predict(TrainStrategy(1, 1, 1, 1, min(micro, len(lengths)), "none"))
        return predicted.seconds - predicted.publish

    async def steps(self, engine: MeasuredEngine, errors: Errors) -> None:
        """Decode steps of unequal contexts, none of them on the grid."""
        random = np.random.default_rng(7)
        step, new = self.costs.of(1), 16
        batches = [[int(c) for c in random.uniform(20, 560, batch)] for batch in (3, 6, 11, 18, 28, 42)]
        passes = [[await engine.decode_step(contexts, new) for contexts in batches] for _ in range(REPEATS)]
        for contexts, samples in zip(batches, zip(*passes, strict=True), strict=True):
            predicted = step.decode_seconds(len(contexts), sum(contexts) + len(contexts) * (1 + new / 2))
            errors.step.append(predicted / median(samples) - 1)

    async def training(self, trainer: MeasuredTrainer, errors: Errors) -> None:
        """Batches of unequal lengths, of the sizes that small runs have."""
        random = np.random.default_rng(8)
        sizes = ((16, 80), (24, 150), (16, 250), (48, 100))
        batches = [
            [int(x) for x in np.clip(random.lognormal(np.log(mean), 0.5, rows), 24, 640)] for rows, mean in sizes
        ]
        measured = await step_seconds(trainer, batches, SAMPLED, self.model.vocabulary, REPEATS)
        errors.train += [self.train_seconds(b) / m - 1 for b, m in zip(batches, measured, strict=True)]

    async def whole(self, engine: MeasuredEngine, trainer: MeasuredTrainer, case: Case, errors: Errors) -> None:
        """An iteration: a batch is rolled out while one like it is trained on."""
        traces = traces_of(case, seed=case.requests)
        lengths = [trace.final for trace in traces]
        batch = trainer.batch(lengths, SAMPLED, self.model.vocabulary)
        samples = []
        for _ in range(REPEATS):
            samples.append(await asyncio.gather(rolled_out(engine, traces), trainer.step(batch, len(lengths))))
        rollout, train = (float(np.median(column)) for column in zip(*samples, strict=True))
        predicted = self.train_seconds(lengths)
        requests = Requests.from_records([trace.record() for trace in traces])
        measured = max(rollout, train)
        closed = set_seconds(requests, self.costs.of(1), self.costs.queue)
        errors.closed.append(max(closed, predicted) / measured - 1)
        errors.whole.append(max(simulated(self.costs, traces), predicted) / measured - 1)


async def bench(name: str, folder: Path, errors: Errors) -> None:
    """Profile one model, then predict."""
    subject = Subject(config_of(name), load_hardware("cpu"), folder)
    chosen = {"batch": (1, 4, 16, 48), "context": (20, 110, 220, 320), "length": (40, 120, 230, 330), "rows": (6, 20)}
    grid = default_grid(subject.config, **chosen)
    profile = await measure(subject, grid, "bench", subject.config.name, lambda text: None)
    trainer = await subject.trainer()
    try:
        weights = await trainer.publish(folder / "again")
        made = Bench(subject, subject.model(weights, subject.config.name), profile)
        await made.training(trainer, errors)
        engine = await subject.engine(weights, made.model)
        try:
            await made.steps(engine, errors)
            for case in (case for case in CASES if case.model == name):
                await made.whole(engine, trainer, case, errors)
        finally:
            await engine.stop()
    finally:
        await trainer.stop()


async def vllm_steps(folder: Path, tp: int) -> list[float]:
    """Relative errors of decode steps of real vLLM at TP ``tp``, off the grid that its costs are fitted to; seconds of
    the wall, medians of `REPEATS`."""
    config, random, new = load_config("vllm_cpu"), np.random.default_rng(7), 16
    subject = Subject(config, load_hardware("cpu"), folder)
    # Prompts that arrive together fit one step: this vLLM cannot cut a seeded request's prefill in two on a CPU.
    grid = default_grid(config, batch=(1, 3, 8), context=(20, 60, 110), prefill=(8, 64, 200), reused=(0,))
    trainer = await subject.trainer()
    try:
        weights = await trainer.publish(folder / "weights")
    finally:
        await trainer.stop()
    engine = await subject.engine(weights, subject.model(weights, config.name), tp)
    try:
        decode, prefill = await measure_engine(engine, grid, tp, lambda text: None)
        capacity = {tp: float(config.engine.slots * config.engine.max_context)}
        (step,), _ = fit_rollout(decode, prefill, capacity, config.engine.slots)
        batches = [[int(c) for c in random.uniform(20, 160, batch)] for batch in (2, 4, 6)]
        passes = [[await engine.decode_step(contexts, new) for contexts in batches] for _ in range(REPEATS)]
    finally:
        await engine.stop()
    return [
        step.decode_seconds(len(contexts), sum(contexts) + len(contexts) * (1 + new / 2)) / median(samples) - 1
        for contexts, samples in zip(batches, zip(*passes, strict=True), strict=True)
    ]


def run() -> Rows:
    """All rows; those of vLLM where it is installed."""
    errors = Errors([], [], [], [])
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as folder:
        for name in MODELS:
            asyncio.run(bench(name, Path(folder) / name, errors))
        degrees = (1, 2) if find_spec("vllm") else ()
        vllm = {tp: asyncio.run(vllm_steps(Path(folder) / f"vllm-tp{tp}", tp)) for tp in degrees}

    def row(found: list[float], aim: float, note: str) -> Row:
        worst = max(map(abs, found))
        return Row(100 * fmean(map(abs, found)), "%", aim, f"{note}; {len(found)} points, worst {100 * worst:.0f} %")

    return {
        "calibration.rollout_step_mape": row(errors.step, AIM_STEP, "off the grid, unequal contexts"),
        "calibration.train_step_mape": row(errors.train, AIM_TRAIN, "off the grid, unequal lengths"),
        "calibration.whole_mape": row(errors.whole, AIM_WHOLE, "simulated iteration of 12 configs"),
        "calibration.whole_closed_form_mape": row(errors.closed, AIM_WHOLE, "the planner's closed form, same configs"),
        "calibration.whole_over_published": row(errors.whole, PUBLISHED_WHOLE, "published, other hardware"),
        **{
            f"calibration.vllm_step_mape.tp{tp}": row(found, AIM_STEP, "vLLM on CPUs, off the grid, unequal contexts")
            for tp, found in vllm.items()
        },
    }
