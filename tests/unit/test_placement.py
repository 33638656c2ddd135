"""Where units of a plan go: whole in a domain, no device twice, and as few changes from the old plan as there can
be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from libra.resources.errors import ConfigError
from libra.resources.inventory import Device, uniform
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


def brute_force(wanted: list[Unit], devices: Sequence[Device], old: tuple[Placement, ...]) -> tuple[int, int]:
    """The least (role changes, restarts) of every way to put every unit on free devices of one domain."""
    if not wanted:
        return 0, 0
    (role, size), *rest = wanted
    best = (99, 99)
    for chosen in combinations(devices, size):
        if len({device.domain for device in chosen}) > 1:
            continue
        here = changes(old, [Placement(role, size, tuple(device.id for device in chosen))])
        further = brute_force(rest, [device for device in devices if device not in chosen], old)
        best = min(best, (here.roles + further[0], here.restarts + further[1]))
    return best


UNITS = st.lists(st.tuples(st.sampled_from(["train", "rollout"]), st.sampled_from([1, 2, 4])), min_size=1, max_size=4)
SMALL = uniform(load_hardware("a800_80g").model_copy(update={"gpus_per_node": 4}), 8).devices


@settings(max_examples=200, deadline=None)
@given(UNITS, UNITS)
def test_as_few_changes_as_any_packing(first: list[Unit], second: list[Unit]) -> None:
    assume(brute_force(first, SMALL, ()) < (99, 99))
    least = brute_force(second, SMALL, old := place(first, SMALL))
    assume(least < (99, 99))
    found = changes(old, place(second, SMALL, old))
    assert (found.roles, found.restarts) == least
