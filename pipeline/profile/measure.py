"""From a run's config to a profile: grids, measurements, fits.

Points are measured in passes over the whole grid, so that a slow minute of the machine does not fall on one of them
alone. A decode step is measured by difference (`MeasuredEngine.decode_step`). A prefill is measured as many together as
one step takes, and priced by what it adds to the steps that it runs in: an engine decodes in the same step, so the
step's own cost is taken off once a step. Invariants: the grid stays within what the engine holds; the profile says
which points it is made of and how wrong its fits are on those they did not see.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import Field

from libra.pipeline.config import RunConfig
from libra.pipeline.profile.engine import MeasuredEngine, Prefilled
from libra.pipeline.profile.meter import Clock, two_cores
from libra.pipeline.profile.trainer import MeasuredTrainer
from libra.pipeline.run.prepare import make_tokenizer_file
from libra.resources.calibration import (
    DecodePoint,
    Fit,
    PrefillPoint,
    Profile,
    Provenance,
    TrainPoint,
    fit_relative,
    fit_rollout,
    fit_training,
)
from libra.resources.calibration.profile import TrainEntry, step_entry
from libra.resources.config import Config
from libra.resources.cost_model import TrainingCosts
from libra.resources.cost_model.training import TrainingFactors
from libra.resources.errors import ConfigError
from libra.resources.specs import HardwareSpec, ModelSpec, load_model, model_from_hf
from libra.resources.types import WeightVersion
from libra.tasks.train import cache_directory

Say = Callable[[str], None]
SPLITTING = ("vllm",)
"""Kinds of engine that split a model among devices, in processes of their own."""
_LEAST_SHARE = 0.05
"""Of what prefills took: what is left to price them by when the steps' own cost is taken off."""
_DECODE_TERMS, _PREFILL_TERMS, _TRAIN_TERMS = 3, 3, 4
"""Coefficients of the fits: a grid has at least as many points."""
_PACKAGES = ("dask-libra", "torch", "transformers", "vllm")


class Grid(Config):
    """What is measured. Values beyond what the engine holds are refused."""

    tp: tuple[int, ...] = (1,)
    """TP degrees."""
    batch: tuple[int, ...] = Field(min_length=1)
    """Sequences of a decode step."""
    context: tuple[int, ...] = Field(min_length=1)
    """Tokens of each before it."""
    prefill: tuple[int, ...] = Field(min_length=2)
    """Tokens of a prefill."""
    reused: tuple[int, ...] = Field(min_length=1)
    """Tokens before it whose KV is reused."""
    length: tuple[int, ...] = Field(min_length=2)
    """Tokens of a training sequence."""
    rows: tuple[int, ...] = Field(min_length=1)
    """Sequences of a training batch."""
    micro_batch_tokens: tuple[int, ...] = Field(min_length=1)
    """Padded tokens of a micro-batch."""
    steps: int = Field(default=16, ge=1)
    """Decode steps of one sample."""
    spread: float = Field(default=0.9, ge=0, lt=1)
    """Contexts of a decode step, and lengths of a batch, lie evenly within this share around the point's value, as
    trajectories that are under way do: an engine or trainer that pads pays for it."""
    sampled: float = Field(default=0.5, gt=0, le=1)
    """Share of loss tokens in training sequences."""
    repeats: int = Field(default=5, ge=1)
    """Samples of which a median is taken."""

    def check(self, config: RunConfig) -> None:
        """`ConfigError` for a point that the config's engine or trainer cannot take."""
        engine = config.engine
        longest = max(self.around(max(self.context), 2)) + self.steps + 1
        filled = max(self.prefill) + max(self.reused)
        limits = (
            ("batch", max(self.batch), engine.slots, "engine.slots"),
            ("context", longest, engine.max_context, f"engine.max_context less {self.steps} steps"),
            ("prefill", filled, engine.max_context - 1, "engine.max_context less 1"),
        )
        for name, value, most, key in limits:
            if value > most:
                raise ConfigError(f"the grid's {name} reaches {value}, the engine holds {most} ({key}); lower it")
        fits = (
            ("batch × context", len(self.batch) * len(self.context), _DECODE_TERMS),
            ("prefill × reused", len(self.prefill) * len(self.reused), _PREFILL_TERMS),
            ("length × rows × micro_batch_tokens",
             len(self.length) * len(self.rows) * len(self.micro_batch_tokens), _TRAIN_TERMS),
        )  # fmt: skip
        for name, points, least in fits:
            if points < least:
                raise ConfigError(f"the grid's {name} is {points} point(s), the fit needs {least}; measure more")
        if config.engine.kind not in SPLITTING and any(tp != 1 for tp in self.tp):
            raise ConfigError(
                f"the grid asks for TP {', '.join(map(str, self.tp))}; engine.kind {config.engine.kind!r} runs at TP 1"
            )

    def around(self, value: int, count: int) -> list[int]:
        """``count`` lengths whose mean is ``value``."""
        if count == 1:
            return [value]
        return [max(1, round(value * (1 + self.spread * (2 * i / (count - 1) - 1)))) for i in range(count)]


def default_grid(config: RunConfig, **chosen: Sequence[int]) -> Grid:
    """A grid that covers what the config's engine holds; ``chosen`` dimensions replace its own."""
    most, slots = config.engine.max_context, config.engine.slots
    batch = sorted({1, min(2, slots), max(1, slots // 16), max(1, slots // 4), max(1, slots // 2), slots})
    room = int((most - 18) / 1.9)
    values = {
        "batch": batch,
        "context": sorted({max(1, room * share // 16) for share in (1, 4, 9, 16)}),
        "prefill": sorted({max(1, most * share // 64) for share in (1, 2, 8, 20, 45)}),
        "reused": sorted({0, most // 4}),
        "length": sorted({max(2, int(most * share / 30.4)) for share in (1, 3, 6, 11, 16)}),
        "rows": (8, 32),
        "micro_batch_tokens": (config.trainer.micro_batch_tokens,),
    }
    return Grid.model_validate(values | {name: tuple(given) for name, given in chosen.items() if given})


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a run's config, the kind of device it runs on, and a folder for logs, weights and batches."""

    config: RunConfig
    hardware: HardwareSpec
    folder: Path

    @property
    def clock(self) -> Clock:
        """CPU seconds where a core is the device and one thread of one process uses it."""
        if self.config.engine.kind in SPLITTING:
            return "wall"
        single = self.config.engine.threads == 1 and self.config.trainer.threads == 1
        return "cpu" if self.hardware.kind == "cpu" and single else "wall"

    @property
    def cores(self) -> tuple[int | None, int | None]:
        """Cores for the engine and the trainer."""
        return two_cores() if self.clock == "cpu" else (None, None)

    def tokenizer(self) -> Path:
        """The run's tokenizer, made if need be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return make_tokenizer_file(self.config, self.folder)

    async def trainer(self, micro_batch_tokens: int | None = None) -> MeasuredTrainer:
        """Its trainer, at version 0."""
        return await MeasuredTrainer.start(
            self.config, self.tokenizer(), self.folder, cache_directory(), core=self.cores[1], clock=self.clock,
            micro_batch_tokens=micro_batch_tokens,
        )  # fmt: skip

    async def engine(self, weights: WeightVersion, model: ModelSpec, tp: int = 1) -> MeasuredEngine:
        """Its engine at TP ``tp``, with weights."""
        return await MeasuredEngine.start(
            self.config.engine, str(self.tokenizer()), weights, model.vocabulary, self.folder / "engine.log",
            tp=tp, core=self.cores[0], clock=self.clock, seed=self.config.seed,
        )  # fmt: skip

    def model(self, weights: WeightVersion, name: str) -> ModelSpec:
        """The spec of published weights, called ``name``. `ConfigError` when they have no config, or ``name`` is a
        known spec of other sizes."""
        if not (Path(weights.path) / "config.json").is_file():
            raise ConfigError(
                f"trainer.kind {self.config.trainer.kind!r} publishes weights without a model's config.json, so there "
                "is no model to measure; profile a config whose trainer has one"
            )
        found = model_from_hf(Path(weights.path)).model_copy(update={"name": name, "bytes_per_parameter": 4})
        try:
            known = load_model(name)
        except ConfigError:
            return found
        if known.parameters != found.parameters:
            raise ConfigError(
                f"{name} is a known model of {known.parameters:,} parameters, the config's has {found.parameters:,}; "
                "name the profile's model by --model"
            )
        return known


async def measure(subject: Subject, grid: Grid, name: str, model_name: str, say: Say) -> Profile:
    """Measure everything and fit it. Raises what engines and trainers raise, and `ConfigError` for a bad grid."""
    config = subject.config
    grid.check(config)
    trainer = await subject.trainer(grid.micro_batch_tokens[0])
    try:
        weights = await trainer.publish(subject.folder / "weights")
        model = subject.model(weights, model_name)
        training = await measure_trainer(trainer, grid, grid.micro_batch_tokens[0], model, say)
    finally:
        await trainer.stop()
    for tokens in grid.micro_batch_tokens[1:]:
        trainer = await subject.trainer(tokens)
        try:
            training += await measure_trainer(trainer, grid, tokens, model, say)
        finally:
            await trainer.stop()
    decode: list[DecodePoint] = []
    prefill: list[PrefillPoint] = []
    for tp in grid.tp:
        engine = await subject.engine(weights, model, tp)
        try:
            decoded, filled = await measure_engine(engine, grid, tp, say)
        finally:
            await engine.stop()
        decode, prefill = decode + decoded, prefill + filled
    capacity = dict.fromkeys(grid.tp, float(config.engine.slots * config.engine.max_context))
    steps, fits = fit_rollout(decode, prefill, capacity, config.engine.slots)
    costs = TrainingCosts(model, subject.hardware, np.array([1.0]), TrainingFactors(logprob_pass=False))
    factors, fits["training"] = fit_training(training, costs)
    entry = TrainEntry(
        linear=factors.linear, quadratic=factors.quadratic, constant=factors.constant,
        fixed_seconds=factors.fixed_seconds, logprob_pass=False,
    )  # fmt: skip
    return Profile(
        name=name, model=model.name, hardware=subject.hardware.name, provenance=_provenance(subject, grid, fits),
        rollout=tuple(step_entry(step) for step in steps), training=entry,
    )  # fmt: skip


async def measure_engine(
    engine: MeasuredEngine, grid: Grid, tp: int, say: Say
) -> tuple[list[DecodePoint], list[PrefillPoint]]:
    """The rollout side of the grid, of one TP degree."""
    steps: dict[tuple[int, int], list[float]] = {}
    fills: dict[tuple[int, int], list[Prefilled]] = {}
    for number in range(grid.repeats):
        say(f"engine at TP {tp}, pass {number + 1} of {grid.repeats}")
        for context, batch in product(grid.context, grid.batch):
            seconds = await engine.decode_step(grid.around(context, batch), grid.steps)
            steps.setdefault((context, batch), []).append(seconds)
        for reused, tokens in product(grid.reused, grid.prefill):
            fills.setdefault((reused, tokens), []).append(await engine.prefill(tokens, reused))
    decode = []
    for (context, batch), samples in steps.items():
        resident = int(sum(grid.around(context, batch)) + batch * (1 + grid.steps / 2))
        decode.append(DecodePoint(tp, batch, resident, median(samples)))
        say(f"decode, {batch} sequences around {context} tokens: {1000 * median(samples):.2f} ms a step")
    filled = []
    for (reused, tokens), found in fills.items():
        filled.append(replace(found[0], seconds=median(each.seconds for each in found)))
        say(f"prefill, {found[0].requests} × {tokens} tokens after {reused}: {1000 * filled[-1].seconds:.2f} ms")
    return decode, prefill_points(filled, decode)


def prefill_points(filled: Sequence[Prefilled], decode: Sequence[DecodePoint]) -> list[PrefillPoint]:
    """What a prefill adds to the steps that it runs in (see the module)."""
    columns = np.array([(1.0, p.batch, p.resident) for p in decode])
    step = float(fit_relative(columns, np.array([p.seconds for p in decode])).coefficients[0])
    return [
        PrefillPoint(
            decode[0].tp, f.tokens, f.context, max(f.seconds - step * f.steps, _LEAST_SHARE * f.seconds) / f.requests
        )
        for f in filled
    ]  # fmt: skip


async def measure_trainer(
    trainer: MeasuredTrainer, grid: Grid, micro_batch_tokens: int, model: ModelSpec, say: Say
) -> list[TrainPoint]:
    """The training side of the grid."""
    lengths = {(length, rows): grid.around(length, rows) for length, rows in product(grid.length, grid.rows)}
    samples = await step_seconds(trainer, list(lengths.values()), grid.sampled, model.vocabulary, grid.repeats)
    points = []
    for ((length, rows), drawn), seconds in zip(lengths.items(), samples, strict=True):
        micro = max(1, micro_batch_tokens // length)
        points.append(TrainPoint(tuple(drawn), min(micro, rows), seconds, "none"))
        say(f"training, {rows} sequences around {length} tokens, micro-batches of {micro}: {1000 * seconds:.1f} ms")
    return points


async def step_seconds(
    trainer: MeasuredTrainer, batches: Sequence[Sequence[int]], sampled: float, vocabulary: int, repeats: int
) -> list[float]:
    """Seconds (medians over passes; one before warms up) of an optimizer step on batches of these lengths."""
    paths = [trainer.batch(lengths, sampled, vocabulary) for lengths in batches]
    passes = [
        [await trainer.step(path, len(lengths)) for path, lengths in zip(paths, batches, strict=True)]
        for _ in range(1 + repeats)
    ]
    return [median(samples) for samples in zip(*passes[1:], strict=True)]


def _provenance(subject: Subject, grid: Grid, fits: dict[str, Fit]) -> Provenance:
    config = subject.config
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    residuals: dict[str, float] = {}
    for name, fit in fits.items():
        residuals |= {name: round(fit.mape, 4), f"{name} held out": round(fit.held_out, 4)}
    values = {name: list(map(float, value)) for name, value in grid.model_dump().items() if isinstance(value, tuple)}
    clock = "CPU seconds, a core each" if subject.cores[0] is not None else f"{subject.clock} seconds"
    return Provenance(
        status="measured", source=f"{config.engine.kind} engine and {config.trainer.kind} trainer", machine=machine(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(), versions=versions, grid=values,
        residuals=residuals, remarks=f"{clock}; medians of {grid.repeats}",
    )  # fmt: skip


def machine() -> str:
    """The processor and how many cores this process may use."""
    found = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        found = names[0] if names else found
    return f"{len(os.sched_getaffinity(0))} cores of {found}"
