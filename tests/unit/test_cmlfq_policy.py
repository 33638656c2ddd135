import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.resources.errors import ConfigError
from libra.resources.types import Bucket, RolloutInstance, ToolState
from libra.scheduler_plugin.cmlfq.policy import CMlfq, _Trail
from libra.scheduler_plugin.policy.base import FinishedTrajectory, Placement, PlacementRequest, load_policy

BUCKETS = (Bucket(1, 4_000), Bucket(2, 12_000), Bucket(4, None))
INSTANCES = tuple(RolloutInstance(f"tcp://a:{tp}", f"r{tp}", tp, 64, 0, 0) for tp in (1, 2, 4))
FAILED = ToolState("test", 2, "failure")
OK = ToolState("test", 0, "ok")


def play(policy: CMlfq, name: str, states: list[ToolState], contexts: list[int], final: int) -> list[Placement]:
    """A whole trajectory, always placed as asked; its placements."""
    current, placed = None, []
    for returns, context in enumerate(contexts):
        request = PlacementRequest(name, name.partition("m")[0], context, states[:returns], current)
        placed.append(policy.place(request, INSTANCES, BUCKETS))
        current = placed[-1].address
    policy.observe(FinishedTrajectory(name, name.partition("m")[0], final, states))
    return placed


def test_it_learns_from_finished_trajectories_and_moves_at_the_return_that_tells():
    policy = CMlfq({})
    for member in range(6):
        tags = [p.tag for p in play(policy, f"g0m{member}", [FAILED], [500, 900], 20_000)]
        assert tags[0] == "rollout:tp1"
        play(policy, f"g1m{member}", [OK], [500, 900], 1_500)
    assert [p.tag for p in play(policy, "g0m9", [FAILED], [500, 900], 20_000)] == ["rollout:tp1", "rollout:tp4"]
    assert [p.tag for p in play(policy, "g0m10", [OK], [500, 900], 1_500)] == ["rollout:tp1", "rollout:tp1"]
    # Another prompt learns from them all.
    assert [p.tag for p in play(policy, "g7m0", [FAILED], [500, 900], 20_000)][1] == "rollout:tp4"


def test_asking_twice_changes_nothing():
    policy = CMlfq({})
    for member in range(6):
        play(policy, f"g0m{member}", [FAILED], [500, 900], 20_000)
    request = PlacementRequest("g0m7", "g0", 900, [FAILED], INSTANCES[0].address)
    first = policy.decide(request, INSTANCES, BUCKETS)
    assert all(policy.decide(request, INSTANCES, BUCKETS) == first for _ in range(5))
    policy.observe(FinishedTrajectory("g0m7", "g0", 20_000, [FAILED]))
    assert policy.tree.now == 6  # Its prompt's context was never told, so it teaches nothing.


def test_a_restarted_trajectory_forgets_its_first_life():
    policy = CMlfq({})
    for context, history in ((500, []), (900, [FAILED]), (4_000, [FAILED, FAILED]), (500, []), (700, [OK])):
        policy.place(PlacementRequest("g0m0", "g0", context, history, None), INSTANCES, BUCKETS)
    policy.observe(FinishedTrajectory("g0m0", "g0", 1_000, [OK]))
    ok = policy.tree.names([OK])[0]
    node = (policy.tree.everywhere.children or {})[ok]
    assert node.mean() == pytest.approx(300)
    assert list(policy.tree.everywhere.children or {}) == [ok]


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([None, 1, 2, 4])), max_size=12))
def test_moves_are_counted_as_they_come_and_anew_after_a_restart(notes):
    trail = _Trail()
    for returns, degree in notes:
        trail.note(returns, 100, degree)
        count, since, last = 0, 0, None
        for known in trail.degrees:
            since += 1
            if known is not None:
                count, since = (count + 1, 0) if last not in (None, known) else (count, since)
                last = known
        assert (trail.moves, trail.rested) == (count, since)


def test_ended_trajectories_leave_nothing_but_what_was_learned():
    policy = CMlfq({"max_trails": 4})
    for member in range(10):
        policy.place(PlacementRequest(f"g0m{member}", "g0", 500, [], None), INSTANCES, BUCKETS)
    assert policy.metrics()["live"] == 4
    for member in range(10):
        policy.observe(FinishedTrajectory(f"g0m{member}", "g0", 700, []))
    assert (policy.metrics()["live"], policy.metrics()["learned"]) == (0, 4)
    assert all(abs(work) < 1e-9 for work in policy._outlook.by_degree.values())


def test_options_are_checked_by_name():
    with pytest.raises(ConfigError, match=r"policy\.half_live.*cmlfq takes half_life, min_evidence"):
        CMlfq({"half_live": 3})
    with pytest.raises(ConfigError, match=r"policy\.router\.damping"):
        CMlfq({"router": {"damping": 2}})


@pytest.mark.parametrize(
    "kind", ["least_loaded:LeastLoaded", "mlfq:Mlfq", "length_threshold:LengthThreshold", "oracle:Oracle"]
)
def test_policies_are_chosen_by_config(kind):
    options = {"final": {"g0m0": 9_000}} if kind.startswith("oracle") else {}
    policy = load_policy({"kind": f"libra.scheduler_plugin.policy.{kind}", **options})
    assert policy.place(PlacementRequest("g0m0", "g0", 100, [], None), INSTANCES, BUCKETS).address is not None
    with pytest.raises(ConfigError, match="nonsense"):
        load_policy({"kind": f"libra.scheduler_plugin.policy.{kind}", "nonsense": 1, **options})
    assert isinstance(load_policy({"kind": "libra.scheduler_plugin.cmlfq.policy:CMlfq"}), CMlfq)


def test_a_failed_trajectory_teaches_nothing_and_is_forgotten():
    policy = CMlfq({})
    policy.place(PlacementRequest("g0m0", "g0", 500, [], None), INSTANCES, BUCKETS)
    policy.observe(FinishedTrajectory("g0m0", "g0", None, []))
    assert policy.tree.now == 0
    assert policy.metrics()["live"] == 0
