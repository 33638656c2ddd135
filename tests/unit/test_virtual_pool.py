"""Roles in virtual time: the pool's state machine with workers that only take time, and what that does to requests."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from libra.resources.cost_model import StepCost
from libra.resources.types import Bucket, Placement
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.routing import RoutingTable
from libra.scheduler_plugin.simulation import Ended, Engine, Moves, RolloutSimulation, Trace, Turn
from libra.scheduler_plugin.simulation.pool import Answer, RoleSeconds, Tick, VirtualPool

DEVICES = tuple(f"n{i // 4}:{i % 4}" for i in range(8))
SECONDS = RoleSeconds(activate=10.0, join=8.0, stop=2.0)
LOAD = 3.0


def cost(tp: int) -> StepCost:
    return StepCost(tp, 0.02 / tp, 1e-4, 1e-6, 0.0, 0.0, 0.0, capacity=1e6, slots=8)


class World:
    """A pool of eight devices on two nodes, its simulation, and what has ended."""

    def __init__(self, placements: list[Placement]) -> None:
        buckets = [Bucket(tp, None) for tp in (1, 2, 4)]
        self.simulation = RolloutSimulation((), buckets, LeastLoaded({}), Moves(1.0, 1e9, 1e9), make=self.engine)
        self.pool = VirtualPool(self.simulation, DEVICES, SECONDS, lambda tp: LOAD, lambda name: False)
        self.ended: list[str] = []
        self.pool.begin(placements)
        self.placements = placements

    def engine(self, address: str, name: str, tp: int) -> Engine:
        node, _, index = name.rpartition(":")
        return Engine(index, node, cost(tp))

    def run(self, until: float = float("inf")) -> None:
        """Handle events up to a time; after each one, no device is in two hands."""
        self.simulation.alarm(until, "until") if until < float("inf") else None
        while (event := self.simulation.step()) not in (None, "until"):
            if isinstance(event, Ended):
                self.ended.append(event.trace.name)
            else:
                assert isinstance(event, Answer | Tick)
                self.pool.handle(event)
            self.check()

    def check(self) -> None:
        taken = [name for name in DEVICES if self.pool.trains([name])]
        for address, instance in self.simulation.table.instances.items():
            first = DEVICES.index(address.removeprefix("tcp://"))
            taken += DEVICES[first : first + instance.tp]
        assert len(taken) == len(set(taken))
        assert set(self.simulation.table.instances) == set(self.simulation.engines)


def layout(sizes: list[int], train: int) -> list[Placement]:
    """The last ``train`` devices train; instances of the sizes that fit stand on the others, aligned to their size."""
    found, at = [], 0
    for size in sorted(sizes, reverse=True):
        if at + size <= len(DEVICES) - train:
            found.append(Placement("rollout", size, DEVICES[at : at + size]))
            at += size
    ranks = [Placement("train", 1, (device,)) for device in DEVICES[len(DEVICES) - train :]]
    return [*ranks, *found]


layouts = st.builds(layout, st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=5), st.integers(1, 3))


def test_a_run_s_own_objects_are_driven() -> None:
    world = World(layout([4, 1], 2))
    assert isinstance(world.simulation.table, RoutingTable)
    assert {i.tp for i in world.simulation.table.instances.values()} == {4, 1}
    assert world.pool.trains(DEVICES[-2:])
    assert world.pool.installed == 0


def test_a_change_takes_draining_stopping_and_starting() -> None:
    world = World(layout([2, 2], 4))
    world.pool.change(layout([4], 4))
    assert world.pool.settled() is None
    world.run()
    # Nothing ran: drained at once, two engines stop together, then one starts on their devices.
    assert world.pool.settled() == SECONDS.stop + SECONDS.activate
    assert [i.tp for i in world.simulation.table.instances.values()] == [4]


def test_weights_are_installed_when_every_instance_has_loaded_them() -> None:
    world = World(layout([2, 2], 4))
    world.pool.published(1)
    assert world.pool.installed == 0
    world.run(until=LOAD - 0.1)
    assert world.pool.installed == 0
    world.run()
    assert world.pool.installed == 1
    assert all(engine.weights == 1 for engine in world.simulation.engines.values())


def test_an_engine_that_starts_meanwhile_loads_the_newer_weights_before_it_offers() -> None:
    world = World(layout([2], 4))
    world.pool.change(layout([2, 2], 4))
    world.run(until=5.0)
    world.pool.published(1)
    world.run(until=SECONDS.activate + LOAD - 0.1)
    assert len(world.simulation.table.instances) == 1
    world.run()
    assert len(world.simulation.table.instances) == 2
    assert world.pool.installed == 1


def test_one_that_is_wanted_again_while_it_drains_loads_what_was_published_meanwhile() -> None:
    world = World(layout([2, 2], 4))
    for i in range(2):
        world.simulation.submit(Trace(f"p{i}e0m0", 50, (Turn(2000),)))
    world.run(until=1.0)
    world.pool.change(layout([2], 4))  # what ran there moves, and its KV is fetched from there
    assert len(world.simulation.table.instances) == 1
    world.pool.published(1)
    world.pool.change(layout([2, 2], 4))
    world.run()
    assert world.pool.installed == 1


@given(layouts, st.lists(st.tuples(layouts, st.floats(0, 40), st.booleans()), max_size=4))
@settings(max_examples=60, deadline=None)
def test_whatever_changes_everything_ends_once_and_every_role_is_there(
    first: list[Placement], changes: list[tuple[list[Placement], float, bool]]
) -> None:
    world = World(first)
    names = [f"p{i}e0m0" for i in range(12)]
    for i, name in enumerate(names):
        world.simulation.submit(Trace(name, 50, (Turn(200 + 100 * i),)))
    version, now = 0, 0.0
    for placements, seconds, publishes in changes:
        now += seconds
        world.run(until=now)
        world.placements = placements
        world.pool.change(placements)
        if publishes:
            version += 1
            world.pool.published(version)
    world.run()
    assert sorted(world.ended) == sorted(names)
    assert world.simulation.table.routes == {}
    wanted = {f"tcp://{p.devices[0]}": p.size for p in world.placements if p.role == "rollout"}
    assert {a: i.tp for a, i in world.simulation.table.instances.items()} == wanted
    assert world.pool.trains(d for p in world.placements if p.role == "train" for d in p.devices)
    assert world.pool.installed == (version if wanted else None)
