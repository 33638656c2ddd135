"""Where units of a plan go: whole in a domain, no device twice, and as few changes from the old plan as there can
be."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from libra.resources.errors import ConfigError
from libra.resources.inventory import uniform
from libra.resources.specs import load_hardware
from libra.resources.types import Placement
from libra.scheduler_plugin.planner.placement import Unit, changes, place

DEVICES = uniform(load_hardware("a800_80g"), 24).devices


def units(train: int, size: int, *instances: int) -> list[Unit]:
    return [("train", size)] * train + [("rollout", tp) for tp in instances]


def test_units_stay_in_their_domain_and_no_device_is_used_twice() -> None:
    placed = place(units(2, 4, 8, 4, 2, 1, 1), DEVICES)
    used = [device for p in placed for device in p.devices]
    assert len(used) == len(set(used)) == 24
    assert all(len({device.split(":")[0] for device in p.devices}) == 1 for p in placed)
    assert sorted(p.size for p in placed) == [1, 1, 2, 4, 4, 4, 8]


@pytest.mark.parametrize("wanted", [units(4, 8), units(3, 8, 1)])
def test_too_many_devices_are_refused(wanted: list[Unit]) -> None:
    with pytest.raises(ConfigError, match="the inventory has 24"):
        place(wanted, DEVICES)


def test_a_group_larger_than_a_domain_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit domains"):
        place([("train", 16)], DEVICES)


def test_the_same_plan_again_changes_nothing() -> None:
    wanted = units(2, 4, 8, 4, 2, 1, 1)
    first = place(wanted, DEVICES)
    assert changes(first, place(wanted, DEVICES, first)) == changes(first, first)
    assert changes(first, first).roles == changes(first, first).restarts == 0


def test_one_more_training_replica_takes_one_instance_and_no_other_role() -> None:
    old = place(units(2, 4, 4, 4, 4, 4), DEVICES)
    new = place(units(3, 4, 4, 4, 4), DEVICES, old)
    assert changes(old, new).roles == 4
    assert changes(old, new).restarts == 4


def test_a_changed_tp_degree_is_no_role_change() -> None:
    old = place(units(1, 8, 8, 8), DEVICES)
    new = place(units(1, 8, 8, 4, 2, 2), DEVICES, old)
    assert changes(old, new).roles == 0
    assert changes(old, new).restarts == 8


def brute_force(wanted: list[Unit], old: tuple[Placement, ...]) -> tuple[int, int]:
    """Every packing of aligned units into two domains of four, up to the order of equal devices."""
    domains = [["n0:0", "n0:1", "n0:2", "n0:3"], ["n1:0", "n1:1", "n1:2", "n1:3"]]
    best = (99, 99)
    for ids in ([*a, *b] for a in permutations(domains[0]) for b in permutations(domains[1])):
        for order in set(permutations(wanted)):
            position, placed, fits = 0, [], True
            for role, size in order:
                if position < 4 < position + size:
                    position = 4
                if position + size > 8:
                    fits = False
                    break
                placed.append(Placement(role, size, tuple(sorted(ids[position : position + size]))))
                position += size
            if fits:
                change = changes(old, placed)
                best = min(best, (change.roles, change.restarts))
    return best


@pytest.mark.parametrize("seed", range(25))
def test_as_few_role_changes_as_any_packing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices = uniform(load_hardware("a800_80g").model_copy(update={"gpus_per_node": 4}), 8).devices

    def some() -> list[Unit]:
        found: list[Unit] = []
        left = 8
        while left > 0 and len(found) < 4:
            size = int(rng.choice([s for s in (1, 2, 4) if s <= left]))
            found.append(("train" if rng.random() < 0.5 else "rollout", size))
            left -= size
        return sorted(found, key=lambda u: -u[1])

    first, second = some(), some()
    try:
        old = place(first, devices)
        new = place(second, devices, old)
    except ConfigError:
        pytest.skip("these units do not fit two domains of four")
    roles, _ = brute_force(second, old)
    assert changes(old, new).roles == roles
