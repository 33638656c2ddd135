"""Which worker takes which role, from what workers say they may take. Pure.

Invariants: a worker takes one role at most; one that offers any ``capable:*`` resource takes only those; if the wanted
roles can be filled at all, they are. Rollout workers get the buckets' TP degrees in the order of their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from libra.resources.errors import ClusterError
from libra.resources.tags import ROLES, Role, capability
from libra.resources.types import Placement
from libra.scheduler_plugin.roles import Duty

_FEW_THREADS = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected worker. ``capable``: slots by role; empty: it says nothing and may take any role."""

    name: str
    nthreads: int
    capable: Mapping[Role, int] = field(default_factory=dict)

    def may(self, role: Role) -> bool:
        """Whether it may take ``role``."""
        return not self.capable or role in self.capable

    def slots(self, role: Role) -> int:
        """Tasks of ``role`` that it holds at once."""
        return self.capable.get(role, self.nthreads)


def candidate(name: str, nthreads: int, resources: Mapping[str, float]) -> Candidate:
    """A candidate from a worker's Dask resources."""
    capable = {role: int(resources[capability(role)]) for role in ROLES if resources.get(capability(role), 0) > 0}
    return Candidate(name, nthreads, capable)


@dataclass(frozen=True, slots=True)
class Assignment:
    """``duties`` by worker name, and what the user should know about it."""

    duties: dict[str, Duty]
    notes: tuple[str, ...]


def assign(
    workers: Sequence[Candidate], roles: Mapping[str, int], buckets: Sequence[Sequence[int | None]]
) -> Assignment:
    """Fill ``roles`` (workers wanted a role) from ``workers``; ``buckets`` are ``[tp, max_context, instances]``.

    Raises `ClusterError` that names the roles that cannot be filled and how to start workers for them.
    """
    degrees = [tp or 1 for tp, _, instances in buckets for _ in range(instances or 0)]
    if roles.get("rollout", 0) != len(degrees):
        raise ClusterError(
            f"the buckets name {len(degrees)} rollout instances but roles.rollout is {roles.get('rollout', 0)}: "
            "make them equal"
        )
    wanted: list[Role] = [role for role in ROLES for _ in range(roles.get(role, 0))]
    filled = _match(wanted, workers)
    if len(filled) < len(wanted):
        raise ClusterError(_missing(wanted, filled, workers))
    chosen: dict[Role, list[Candidate]] = {role: [] for role in ROLES}
    for index, worker in filled.items():
        chosen[wanted[index]].append(worker)
    duties: dict[str, Duty] = {}
    for role, members in chosen.items():
        for place, worker in enumerate(sorted(members, key=name_order)):
            duties[worker.name] = Duty(role, degrees[place] if role == "rollout" else None)
    return Assignment(duties, _notes(duties, workers))


def fill(vacant: Sequence[Duty], spare: Sequence[Candidate]) -> dict[str, Duty]:
    """Spare workers for duties whose workers are away, as many as can be had."""
    filled = _match([duty.role for duty in vacant], spare)
    return {worker.name: vacant[index] for index, worker in filled.items()}


def duties_of(placements: Iterable[Placement], devices: Iterable[str]) -> dict[str, Duty | None]:
    """What every device's worker does under a plan: a training rank is a device's, an instance its first device's; the
    others have no duty."""
    found: dict[str, Duty | None] = dict.fromkeys(devices)
    for placement in placements:
        if placement.role == "train":
            found |= dict.fromkeys(placement.devices, Duty("train"))
        else:
            found[placement.devices[0]] = Duty("rollout", placement.size)
    return found


def name_order(worker: Candidate) -> tuple[tuple[int, str], ...]:
    """Sort key under which ``rollout-2`` comes before ``rollout-10``."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", worker.name) if part)


def _match(wanted: Sequence[Role], workers: Sequence[Candidate]) -> dict[int, Candidate]:
    """A maximum matching of demands to workers (augmenting paths, Kuhn 1955), by index of the demand. Workers that say
    least of themselves are taken last."""
    order = sorted(workers, key=lambda worker: (not worker.capable, len(worker.capable), name_order(worker)))
    taken: dict[str, int] = {}
    by_name = {worker.name: worker for worker in workers}

    def seat(demand: int, tried: set[str]) -> bool:
        for worker in sorted(order, key=lambda worker: worker.name in taken):
            if worker.name in tried or not worker.may(wanted[demand]):
                continue
            tried.add(worker.name)
            holder = taken.get(worker.name)
            if holder is None or seat(holder, tried):
                taken[worker.name] = demand
                return True
        return False

    for demand in range(len(wanted)):
        seat(demand, set())
    return {demand: by_name[name] for name, demand in taken.items()}


def _missing(wanted: Sequence[Role], filled: Mapping[int, Candidate], workers: Sequence[Candidate]) -> str:
    short = [role for index, role in enumerate(wanted) if index not in filled]
    lines = [
        f"{role}: {wanted.count(role)} wanted, {short.count(role)} missing"
        f" (may take it: {', '.join(w.name for w in workers if w.may(role)) or 'no worker'})"
        for role in ROLES
        if role in short
    ]
    role = short[0]
    slots = 512 if role in ("rollout", "tool") else 1
    example = f"--nthreads {slots} --resources '{capability(role)}={slots}'"
    return (
        f"the cluster's {len(workers)} worker(s) cannot fill the roles of this run, one role a worker. "
        f"{'; '.join(lines)}. Start more with: dask worker SCHEDULER {example}"
    )


def _notes(duties: Mapping[str, Duty], workers: Sequence[Candidate]) -> tuple[str, ...]:
    notes = []
    plain = [worker for worker in workers if worker.name in duties and not worker.capable]
    if plain:
        chosen = ", ".join(f"{worker.name} → {duties[worker.name]}" for worker in sorted(plain, key=name_order))
        notes.append(f"workers without a `capable:` resource got their roles by name: {chosen}")
    for worker in workers:
        duty = duties.get(worker.name)
        if duty is not None and duty.role == "rollout" and worker.nthreads < _FEW_THREADS:
            notes.append(
                f"rollout worker {worker.name} has {worker.nthreads} thread(s), so at most that many trajectories "
                "generate on it at once; start rollout workers with --nthreads 512"
            )
    return tuple(notes)
