"""A recorded run simulated: its own trajectories, config and policy, costs from a profile; step times side by side.

Taken from the record: what trajectories did (tokens, tool returns and their seconds), which groups taught nothing, how
long a trajectory was handed over between tasks, and what a step spent on storing, publishing and handing over.
Predicted: what engines and the trainer take, queueing, and when batches are full. Groups that taught nothing are not
stored, and are not like others (where every member does as well, tasks are easy and short): what they did is in the
metrics. A group of which nothing is known (it was open at the end) is replayed as the known one admitted nearest to it.
The first step (it waits for the first evaluation and warms up) is simulated but not compared.

Invariants: reads files only; a step is compared only if it was trained in the run's own time (not replayed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from libra.pipeline.config import RunConfig, parse
from libra.pipeline.simulate.played import played, trace_of_row
from libra.pipeline.simulate.recorded_plan import devices_of, recorded_plan, with_degrees
from libra.pipeline.store.run_folder import RunFolder
from libra.pipeline.view.files import read_metrics
from libra.resources.batches import BatchReader
from libra.resources.calibration import Profile
from libra.resources.cost_model import RolloutCosts, StepCost
from libra.resources.cost_model.rollout import QueueModel
from libra.resources.cost_model.training import TrainingFactors
from libra.resources.errors import StoreError
from libra.resources.inventory import uniform
from libra.resources.specs import ModelSpec, load_hardware, load_model, model_from_hf
from libra.scheduler_plugin.planner import Planner, PlannerConfig
from libra.scheduler_plugin.planner.planner import Profiles
from libra.scheduler_plugin.planner.scaling import scaled
from libra.scheduler_plugin.policy import load_policy
from libra.scheduler_plugin.simulation import LoopConfig, Moves, RunLoop, StepReport, Trace
from libra.tasks.engines.scripted import PaceOptions
from libra.tasks.registry import launches_of
from libra.tasks.trainers.scripted import ScriptedTrainerOptions

_PACED = ("scripted", "random")
_CORRECTIONS, _CLOSE = 8, 0.02
"""Rounds at most, and how near the ratios must come: slower engines also queue longer, so that one is not enough."""
_MOST = 16.0
"""Largest correction."""
UNSHARED = (
    "engine and trainer are priced as if each had its cores to itself: where the run's processes shared them with one "
    "another and with driver, scheduler and environments, real steps were longer (--correct measures by how much)"
)
"""What a replay with costs as measured does not model."""
_STEP_CAUSES = ("publish", "checkpoint", "other")
"""Waits of the trainer that no cost model describes."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What a run folder tells. ``engine_seconds``: that the trajectories of a step's batch were on engines, by step.
    ``groups``: traces by the group's number; ``returned``: numbers of groups that were returned. ``steps``: the metrics
    of the steps compared, by step; ``last``: the last of them. ``aside``: seconds of a step that went into storing,
    publishing and handing over; ``install``: seconds until engines had a version. ``model``: None for a run without
    one."""

    folder: Path
    config: RunConfig
    groups: Mapping[int, Sequence[Trace]]
    returned: frozenset[int]
    engine_seconds: Mapping[int, float]
    steps: Mapping[int, Mapping[str, Any]]
    last: int
    aside: float
    install: float
    model: ModelSpec | None


@dataclass(frozen=True, slots=True)
class Replay:
    """Simulated beside real: ``(step, simulated, real)`` seconds of every step compared. ``corrected``: by the run's
    first half."""

    recording: Recording
    provenance: str
    rows: tuple[tuple[int, float, float], ...]
    corrected: bool = False

    @property
    def simulated(self) -> float:
        """Mean seconds of a step."""
        return fmean(row[1] for row in self.rows)

    @property
    def real(self) -> float:
        """Mean seconds of a step."""
        return fmean(row[2] for row in self.rows)

    @property
    def caveat(self) -> str:
        """What the figures leave out; empty where they are corrected."""
        return "" if self.corrected else UNSHARED

    def to_plain(self) -> dict[str, Any]:
        """Plain values."""
        steps = [{"step": step, "simulated": simulated, "real": real} for step, simulated, real in self.rows]
        return {
            "run": self.recording.config.name, "costs": self.provenance, "simulated": self.simulated,
            "real": self.real, "error": self.simulated / self.real - 1, "caveat": self.caveat, "steps": steps,
        }  # fmt: skip


def is_run(path: str) -> bool:
    """Whether ``path`` is a run folder."""
    return (Path(path) / "run.json").is_file()


def read_recording(path: Path) -> Recording:
    """Read a run folder. `StoreError` when it holds too little to compare."""
    folder = RunFolder.open(path)
    config = parse(folder.read_config(), f"{path}/config.yaml")
    groups: dict[int, list[Trace]] = {}
    engines: dict[int, float] = {}
    for batch in sorted(folder.trajectories.glob("step-*.zarr")):
        reader = BatchReader(batch)
        step = int(reader.attributes["version"]) + 1
        for trajectory in reader.trajectories():
            engines[step] = engines.get(step, 0.0) + trajectory.generate_seconds
            groups.setdefault(trajectory.id.group, []).append(played(trajectory, config.environment.kind))
    stored, metrics = frozenset(groups), read_metrics(path)
    for record in metrics.groups:
        groups.setdefault(record["group"], [trace_of_row(row, config.environment.kind) for row in record["played"]])
    records = {record["step"]: record for record in metrics.steps if not record["replayed"]}
    steps = {step: record for step, record in records.items() if step > 1}
    if not steps or not stored:
        raise StoreError(
            f"{path} has {len(records)} trained step(s) and {len(stored)} stored group(s); a replay compares the steps "
            "after the first: let the run train two at least"
        )
    aside = median(_aside(record) for record in steps.values())
    install = median(record["publish_seconds"] or 0.0 for record in steps.values())
    return Recording(
        path, config, groups, frozenset(range(max(stored))) - stored, engines, steps, max(steps), aside,
        install, _model(folder),
    )  # fmt: skip


def _aside(record: Mapping[str, Any]) -> float:
    """Seconds of a step that the trainer neither trained nor waited for a batch."""
    spent = record["idle"].get("train", {})
    handed = max(0.0, spent.get("busy", 0.0) - record["train_seconds"])
    return float(handed + sum(spent.get(cause, 0.0) for cause in _STEP_CAUSES))


def replay(recording: Recording, profile: Profile | None = None, correct: bool = False) -> Replay:
    """Simulate the recorded run. Without a ``profile`` engines without a model take the pace of their config, others
    what the specs say. ``correct``: the first half of the steps tells by how much engines and trainer were slower (they
    shared their machine), and the others are compared. A TP degree that the profile lacks is scaled from another one,
    and the provenance says so."""
    planner = _planner(recording, profile, 1.0, 1.0)
    provenance = planner.rollout_costs(planner.inventory.hardware[0]).provenance
    reports = _simulate(recording, planner)
    compared = sorted(recording.steps)
    if correct:
        half, compared = compared[: len(compared) // 2], compared[len(compared) // 2 :]
        engine = trainer = 1.0
        for _ in range(_CORRECTIONS):
            slower = _ratio(recording.engine_seconds, {s: reports[s].engine_seconds for s in half})
            trained = {step: max(1e-9, reports[step].train_seconds - recording.aside) for step in half}
            busier = _ratio({s: float(recording.steps[s]["train_seconds"]) for s in half}, trained)
            # Half of what is missing of the engines' at a time (in logarithms): queueing amplifies their factor.
            engine, trainer = _bounded(engine * slower**0.5), _bounded(trainer * busier)
            if max(abs(slower - 1), abs(busier - 1)) < _CLOSE:
                break
            reports = _simulate(recording, _planner(recording, profile, engine, trainer))
        provenance += f", corrected by {len(half)} steps: engines × {engine:.2f}, trainer × {trainer:.2f}"
    rows = tuple((step, reports[step].seconds, float(recording.steps[step]["seconds"])) for step in compared)
    return Replay(recording, provenance, rows, correct)


def _ratio(real: Mapping[int, float], simulated: Mapping[int, float]) -> float:
    """By how much the one is above the other in the median step: a step that something else slowed down counts once."""
    ratios = [real[step] / seconds for step, seconds in simulated.items() if seconds > 0 and real[step] > 0]
    return median(ratios) if ratios else 1.0


def _bounded(factor: float) -> float:
    return min(_MOST, max(1 / _MOST, factor))


def _simulate(recording: Recording, planner: Planner) -> dict[int, StepReport]:
    """The run in virtual time; reports by step."""
    config = recording.config
    batches = list(recording.groups.values())
    mean = fmean(trace.final for group in batches for trace in group)
    micro = max(1, min(int(config.trainer.micro_batch_tokens // mean), config.batch_groups * config.group_size))
    plan = recorded_plan(config, planner.inventory, micro)
    returned = {_group(recording, number)[0].group for number in recording.returned}
    loop = RunLoop(
        LoopConfig(recording.last, config.batch_groups, config.group_size, config.staleness.alpha,
            config.algorithm.min_usable, config.groups.partial == "require_full", install_seconds=recording.install,
            seed=config.seed),
        planner, plan, lambda number: _group(recording, number), load_policy(config.policy.options()),
        Moves(0.0, 1.0, 1.0, shared=False), returned=returned.__contains__,
    )  # fmt: skip
    return {report.step: report for report in loop.run().steps}


def _planner(recording: Recording, profile: Profile | None, engine: float, trainer: float) -> Planner:
    """The planner of the run; its costs are multiplied by ``engine`` and ``trainer``."""
    config = recording.config
    hardware = load_hardware(profile.hardware if profile else "cpu")
    model = recording.model or load_model("quickstart")
    profiles = Profiles.of(profile) if profile else Profiles()
    if profile is None and config.engine.kind in _PACED:
        profiles = Profiles({hardware.name: _paced(config)}, {hardware.name: _scripted(config)})
    settings = PlannerConfig(
        trainer="torch", launches=launches_of("torch"), slots=config.engine.slots, overlap=config.staleness.alpha + 1
    )
    planner = Planner(model, uniform(hardware, devices_of(config)), settings, profiles)
    costs = with_degrees(planner.rollout_costs(hardware), (bucket.tp for bucket in config.buckets))
    rollout = {hardware.name: costs}
    slower = scaled(replace(planner, profiles=replace(profiles, rollout=rollout)), engine, trainer)
    factors = slower.profiles.training[hardware.name]
    training = {hardware.name: replace(factors, fixed_seconds=factors.fixed_seconds + recording.aside)}
    return replace(slower, profiles=replace(slower.profiles, training=training))


def _paced(config: RunConfig) -> RolloutCosts:
    """The pace of an engine without a model: every running request gets ``tokens_per_step`` tokens a step, whatever the
    TP degree of its instance."""
    names = PaceOptions.model_fields
    pace = PaceOptions.model_validate({k: v for k, v in config.engine.options.items() if k in names})
    step = pace.step_seconds / pace.tokens_per_step
    capacity = float(config.engine.slots * config.engine.max_context)
    degrees = sorted({bucket.tp for bucket in config.buckets})
    costs = tuple(StepCost(tp, step, 0.0, 0.0, 0.0, 0.0, 0.0, capacity, config.engine.slots) for tp in degrees)
    return RolloutCosts(costs, QueueModel(), f"the pace of the {config.engine.kind} engine")


def _scripted(config: RunConfig) -> TrainingFactors:
    options = ScriptedTrainerOptions.model_validate(config.trainer.options)
    return TrainingFactors(0.0, 0.0, 0.0, options.train_seconds)


def _model(folder: RunFolder) -> ModelSpec | None:
    configs = sorted(folder.checkpoints.glob("*/config.json"))
    if not configs:
        return None
    return model_from_hf(configs[-1]).model_copy(update={"name": folder.path.name, "bytes_per_parameter": 4})


def _group(recording: Recording, number: int) -> list[Trace]:
    """The traces of the n-th group admitted; beyond the record it begins again, under other names."""
    count = max(recording.groups) + 1
    again, number = divmod(number, count)
    traces = recording.groups.get(number) or _stand_in(recording, number)
    if not again:
        return list(traces)
    return [replace(trace, name=f"p{number}e{1000 + again}m{member}") for member, trace in enumerate(traces)]


def _stand_in(recording: Recording, number: int) -> list[Trace]:
    """For a group of which nothing is known: the known one admitted nearest to it, under a name of its own."""
    nearest = min(recording.groups, key=lambda other: (abs(other - number), other))
    return [
        replace(trace, name=f"p{number}e999m{member}") for member, trace in enumerate(recording.groups[nearest])
    ]  # fmt: skip
