"""Which devices do what: units of a plan packed into nodes, with as few changes from an older plan as possible.

A unit is a training rank group (TP·EP devices) or an instance (TP devices); its devices share an NVLink domain.
Invariants: no device is given twice; a unit of the new plan that has an equal in the old one (role and size) stays on
its devices whenever the packing allows it; among packings tried, the one with the fewest role changes wins, then the
one with the fewest devices that start anew. On up to eight devices that is the least of all packings there are; on
more it is the best of a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from libra.resources.errors import ConfigError
from libra.resources.inventory import Device
from libra.resources.types import Placement
from libra.resources.types.planning import PlannedRole

Unit = tuple[PlannedRole, int]
"""Role and size."""


_EXACT = 8
"""Devices up to which every packing is looked at."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Devices whose role changes (idle ones excepted), and devices that start anew (role, size or partners differ)."""

    roles: int
    restarts: int


def place(units: Iterable[Unit], devices: Sequence[Device], old: Sequence[Placement] = ()) -> tuple[Placement, ...]:
    """Put every unit on devices of one domain. Raises `ConfigError` when they do not fit.

    On few devices with an old plan the packing of least change is found; else three are tried: around the equal units
    of ``old``; around those of them that share a domain with other kept units, the emptiest domains given up first; and
    afresh with domains matched to their old contents.
    """
    wanted = sorted(units, key=lambda unit: (-unit[1], unit[0] != "train"))
    total = sum(size for _, size in wanted)
    if total > len(devices):
        raise ConfigError(f"the plan needs {total} devices, the inventory has {len(devices)}")
    domains: dict[str, list[str]] = {}
    for device in devices:
        domains.setdefault(device.domain, []).append(device.id)
    known = {d.id for d in devices}
    alive = [p for p in old if known.issuperset(p.devices)]
    # Kept domains are given up one by one while there are few, by powers of two when there are many.
    few = len(domains) <= 16
    steps = list(range(len(domains) + 1)) if few else [0, *(2**k for k in range(len(domains).bit_length() + 1))]
    if alive and len(devices) <= _EXACT and (best := _least(wanted, devices, alive)) is not None:
        return best
    tried = [_keep(wanted, domains, alive, given_up) for given_up in (steps if alive else [0])]
    packed = [each for each in tried if each is not None]
    if not packed:
        sizes = Counter(size for _, size in wanted)
        text = ", ".join(f"{n} of {size}" for size, n in sorted(sizes.items(), reverse=True))
        raise ConfigError(
            f"units ({text} devices each) do not fit domains of {[len(d) for d in domains.values()]} devices"
        )
    return min(packed, key=lambda each: _key(changes(alive, each)))


def changes(old: Sequence[Placement], new: Sequence[Placement]) -> Changes:
    """What going from ``old`` to ``new`` takes."""
    before = {device: p for p in old for device in p.devices}
    roles = restarts = 0
    for placement in new:
        for device in placement.devices:
            was = before.get(device)
            roles += was is not None and was.role != placement.role
            restarts += was is None or (was.role, was.devices) != (placement.role, placement.devices)
    return Changes(roles, restarts)


def _key(change: Changes) -> tuple[int, int]:
    return change.roles, change.restarts


def _least(wanted: Sequence[Unit], devices: Sequence[Device], old: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """The packing of least change: what a unit costs depends on its own devices only, so the least cost of the units
    from the i-th on depends on the devices taken before them only (dynamic programming over sets of devices)."""
    order = sorted(wanted, key=lambda unit: (-unit[1], unit[0] != "train"))
    found: dict[tuple[int, int], tuple[tuple[int, int], tuple[Placement, ...]] | None] = {}

    def solve(i: int, taken: int) -> tuple[tuple[int, int], tuple[Placement, ...]] | None:
        if i == len(order):
            return (0, 0), ()
        if (i, taken) not in found:
            role, size = order[i]
            best = None
            free = [k for k in range(len(devices)) if not taken >> k & 1]
            for chosen in combinations(free, size):
                if len({devices[k].domain for k in chosen}) > 1:
                    continue
                further = solve(i + 1, taken | sum(1 << k for k in chosen))
                if further is None:
                    continue
                placement = Placement(role, size, tuple(devices[k].id for k in chosen))
                own = changes(old, [placement])
                cost = own.roles + further[0][0], own.restarts + further[0][1]
                if best is None or cost < best[0]:
                    best = cost, (placement, *further[1])
            found[i, taken] = best
        return found[i, taken]

    least = solve(0, 0)
    return None if least is None else _sorted(least[1])


def _sorted(placed: Iterable[Placement]) -> tuple[Placement, ...]:
    return tuple(sorted(placed, key=lambda p: (p.role != "train", -p.size, p.devices)))


def _keep(
    wanted: Sequence[Unit], domains: dict[str, list[str]], old: Sequence[Placement], given_up: int
) -> tuple[Placement, ...] | None:
    """Keep old units that have an equal in ``wanted``, except in the ``given_up`` domains that keep least; pack the
    rest."""
    need = Counter(wanted)
    domain_of = {device: name for name, ids in domains.items() for device in ids}
    by_domain: dict[str, list[Placement]] = {name: [] for name in domains}
    for placement in old:
        by_domain[domain_of[placement.devices[0]]].append(placement)

    def matching(name: str) -> int:
        return sum(p.size for p in by_domain[name] if need[(p.role, p.size)])

    order = sorted(domains, key=lambda name: -matching(name))
    kept: list[Placement] = []
    for name in order[: max(0, len(order) - given_up)]:
        # Units whose kind has the most to lose last: the fullest domains keep theirs whole.
        for placement in sorted(by_domain[name], key=lambda p: -p.size):
            if need[(placement.role, placement.size)] > 0:
                need[(placement.role, placement.size)] -= 1
                kept.append(placement)
    taken = {device for p in kept for device in p.devices}
    free = {name: [d for d in ids if d not in taken] for name, ids in domains.items()}
    role_of = {device: p.role for p in old for device in p.devices}
    placed = list(kept)
    for role, size in (unit for unit in wanted if need[unit] > 0):
        if need[(role, size)] == 0:
            continue
        need[(role, size)] -= 1
        at = _choose(role, size, free, role_of)
        if at is None:
            return None
        ids = sorted(free[at], key=lambda d: _strangeness(role, role_of.get(d)))[:size]
        chosen = tuple(d for d in free[at] if d in set(ids))
        free[at] = [d for d in free[at] if d not in set(ids)]
        if not free[at]:
            del free[at]
        placed.append(Placement(role, size, chosen))
    return _sorted(placed)


def _choose(role: str, size: int, free: dict[str, list[str]], role_of: dict[str, PlannedRole]) -> str | None:
    """The domain where the fewest roles change, then where the fewest idle devices are taken (others may need them),
    then the one that is left with the least, so that large gaps stay."""
    best: tuple[tuple[int, int, int, int], str] | None = None
    names = free if role == "train" else reversed(free)
    for position, name in enumerate(names):
        ids = free[name]
        if len(ids) < size:
            continue
        own = sum(role_of.get(d) == role for d in ids) if role_of else size
        idle = sum(d not in role_of for d in ids) if role_of else 0
        changed, fresh = max(0, size - own - idle), max(0, size - own)
        if fresh == 0 and len(ids) == size:
            return name
        key = (changed, fresh, len(ids) - size, position)
        if best is None or key < best[0]:
            best = (key, name)
    return best[1] if best else None


def _strangeness(role: str, was: str | None) -> int:
    """0 for a device of the role, 1 for an idle one, 2 for one that changes its role."""
    return 1 if was is None else 2 * (was != role)
