"""``libra plan``: what the planner would do, why, and what was close."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from libra.resources.errors import ConfigError

if TYPE_CHECKING:
    from libra.resources.inventory import Inventory
    from libra.resources.types import Plan, RequestRecord
    from libra.scheduler_plugin.planner import Planner, PlannerConfig


@click.command()
@click.option(
    "--model", default="Qwen3-14B", show_default=True, help="A shipped model, a spec file, or a HF checkpoint."
)
@click.option(
    "--cluster", help="A shipped cluster, or a cluster file (conf/cluster); 'nvml' asks this machine's driver."
)
@click.option("--gpus", type=click.IntRange(min=2), help="With --hardware, instead of --cluster: number of devices.")
@click.option("--hardware", help="With --gpus: kind of device (a800_80g when not given).")
@click.option("--profile", help="A profile (conf/profiles) that replaces derived costs.")
@click.option("--config", help="A run config: plan for its trainer, slots and staleness bound.")
@click.option("--trainer", help="Only strategies that it can launch are offered.  [default: the config's, or megatron]")
@click.option("--lengths", type=click.Path(exists=True, dir_okay=False), help="Final contexts, one a line (or JSON).")
@click.option("--requests", default=2048, show_default=True, help="Without --lengths: trajectories of a batch.")
@click.option("--mean", default=8000.0, show_default=True, help="Without --lengths: mean final context, tokens.")
@click.option("--alpha", type=click.IntRange(min=0), help="Staleness bound of the run.  [default: the config's, or 1]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the synthetic workload.")
@click.option("--slots", type=click.IntRange(min=1), help="Sequences of an instance.  [default: the config's, or 256]")
@click.option("--split-prefill", is_flag=True, help="Consider prefill apart from decode (several kinds of hardware).")
@click.option(
    "--simulate",
    "seconds",
    type=click.FloatRange(min=0),
    help="Seconds to simulate the best plans for, to choose among them; 0: none.  [default: 5, on one kind of device]",
)
@click.option(
    "--explain",
    is_flag=True,
    help="List every node of the training tree, kept or pruned, with its reason, for every number of devices.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def plan(
    model: str, cluster: str | None, gpus: int | None, hardware: str | None, profile: str | None, config: str | None,
    trainer: str | None, lengths: str | None, requests: int, mean: float, alpha: int | None, seed: int,
    slots: int | None, split_prefill: bool, seconds: float | None, explain: bool, as_json: bool,
) -> None:  # fmt: skip
    """Plan a cluster: how many devices train and how many roll out, and how."""
    from libra.pipeline.commands.plan_close import close_plans, close_strategies, explained
    from libra.pipeline.commands.plan_view import show
    from libra.resources.calibration import load_profile
    from libra.resources.specs import load_model
    from libra.scheduler_plugin.planner import Planner
    from libra.scheduler_plugin.planner.planner import Profiles

    settings = _settings(config, trainer, slots, alpha).model_copy(update={"split_prefill": split_prefill})
    profiles = Profiles.of(load_profile(profile)) if profile else Profiles()
    planner = Planner(load_model(model), _inventory(cluster, gpus, hardware), settings, profiles)
    records = _records(lengths, requests, mean, seed)
    chosen = planner.plan(records)
    chosen, simulated = _simulated(planner, records, chosen, seconds)
    plans, strategies = close_plans(planner, records, chosen), close_strategies(planner, records, chosen)
    trees = explained(planner, records, None if explain else chosen)
    if as_json:
        data = chosen.to_plain() | {
            "simulated": simulated,
            "trainer": {"kind": settings.trainer, "launchable": settings.launches is not None},
            "remarks": list(planner.model.remarks),
            "close": {"plans": [p.to_plain() for p in plans], "strategies": [s.to_plain() for s in strategies]},
            "trees": [tree.to_plain() for tree in trees],
        }
        click.echo(json.dumps(data))
        return
    show(planner, chosen, records, [*plans, *strategies], trees if explain else [], simulated)


def _settings(config: str | None, trainer: str | None, slots: int | None, alpha: int | None) -> PlannerConfig:
    """What plans may look like: as the options say, else the run config, else as a large run would have it."""
    from libra.pipeline.config import load_config
    from libra.pipeline.run.spec import planner_of
    from libra.scheduler_plugin.planner import PLANNED, PlannerConfig
    from libra.tasks.registry import kinds, launches_of

    base = planner_of(load_config(config)).planner if config else PlannerConfig()
    update: dict[str, Any] = {}
    if trainer in PLANNED:
        update = {"trainer": trainer, "launches": None}
    elif trainer is not None:
        if ":" not in trainer and trainer not in kinds("trainer"):
            raise ConfigError(
                f"--trainer {trainer!r} is no trainer; take {' or '.join(kinds('trainer'))}, {' or '.join(PLANNED)} "
                "(to plan for: nothing here launches it yet), or an import path such as 'my.module:Trainer'"
            )
        update = {"trainer": trainer, "launches": launches_of(trainer)}
    if slots is not None:
        update["slots"] = slots
    if alpha is not None or config is None:
        update["overlap"] = (1 if alpha is None else alpha) + 1
    return base.model_copy(update=update)


def _simulated(
    planner: Planner, records: list[RequestRecord], chosen: Plan, seconds: float | None
) -> tuple[Plan, dict[str, Any]]:
    """The plan that is fastest as simulated, and how it was found; ``chosen`` where nothing is simulated."""
    from libra.scheduler_plugin.planner.rescore import SECONDS, Job
    from libra.scheduler_plugin.planner.rescoring import Rescoring

    kinds = planner.inventory.kinds
    if seconds is None and len(kinds) > 1:
        return chosen, {"plans": 0, "why": f"plans on several kinds of hardware ({', '.join(kinds)}) are not simulated"}
    limit = SECONDS if seconds is None else seconds
    if not math.isfinite(limit):
        raise ConfigError(f"--simulate {limit}: give a number of seconds; 0 simulates nothing")
    if limit == 0:
        return chosen, {}
    found = Rescoring(limit).run(Job(planner, records, alpha=planner.config.overlap - 1))
    if found is None:
        return chosen, {"plans": 0, "why": f"none was done within {limit:g} s; --simulate allows more"}
    return found.plan, {
        "plans": found.count, "offered": found.offered, "seconds": found.seconds,
        "seconds_of_predicted_best": found.predicted,
    }  # fmt: skip


def _inventory(cluster: str | None, gpus: int | None, hardware: str | None) -> Inventory:
    from libra.resources.inventory import from_cluster, from_nvml, uniform
    from libra.resources.specs import load_hardware

    if cluster and gpus:
        raise ConfigError(f"--cluster {cluster} and --gpus {gpus} both say what there is; give one of them")
    if hardware and not gpus:
        what = f"--cluster {cluster} says" if cluster else "the cluster says"
        raise ConfigError(f"--hardware {hardware} goes with --gpus N; without it {what} what devices there are")
    if cluster == "nvml":
        return from_nvml()
    if gpus:
        return uniform(load_hardware(hardware or "a800_80g"), gpus)
    return from_cluster(cluster or "a800_48")


def _records(lengths: str | None, requests: int, mean: float, seed: int) -> list[RequestRecord]:
    from libra.pipeline.simulate.workload import Workload, WorkloadConfig
    from libra.resources.types import RequestRecord

    if lengths is None:
        longest = WorkloadConfig().limit
        if requests < 1 or not 500 <= mean <= longest:
            raise ConfigError(
                f"--requests {requests} and --mean {mean:g}: at least 1 request, and a mean of 500 to {longest:,} "
                "tokens (the longest of the synthetic workload; --lengths takes any)"
            )
        members = 16 if requests >= 16 else requests
        workload = Workload(WorkloadConfig(mean_from=mean, mean_to=mean), seed, 1, -(-requests // members), members)
        return [trace.record() for trace in workload.batch(0)][:requests]
    return [
        RequestRecord.from_turns(f"g{i}m0", min(512, length // 2), [(length - min(512, length // 2), 0, 0.0)])
        for i, length in enumerate(_read_lengths(Path(lengths)))
    ]


def _read_lengths(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
        if odd := [value for value in found if type(value) is not int]:
            raise ValueError(f"{odd[0]!r} is no whole number")
        lengths: list[int] = found
    except ValueError as error:
        raise ConfigError(f"{path} must hold final contexts in tokens, one a line or as a JSON list: {error}") from None
    if not lengths or min(lengths) < 2:
        raise ConfigError(
            f"{path} holds {len(lengths)} lengths, the least {min(lengths, default=0)}; each is at least 2"
        )
    return lengths
