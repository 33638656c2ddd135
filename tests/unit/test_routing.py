"""Buckets, stickiness and load, without Dask."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.resources.errors import ConfigError
from libra.resources.types import Bucket, RolloutInstance, ToolState
from libra.scheduler_plugin.policy import FinishedTrajectory, Placement, PlacementRequest, load_policy
from libra.scheduler_plugin.policy.context_bounds import ContextBounds
from libra.scheduler_plugin.routing import RoutingTable

BUCKETS = (Bucket(1, 100), Bucket(2, 1000), Bucket(4, None))
OK = ToolState("search", 0, "ok")


def request(context: int, current: str | None = None) -> PlacementRequest:
    return PlacementRequest("g0m0", "g0", context, (), current)


def instance(name: str, tp: int, tokens: int = 0) -> RolloutInstance:
    return RolloutInstance(f"tcp://{name}", name, tp, 8, 0, tokens)


@given(st.integers(1, 3000), st.sets(st.sampled_from((1, 2, 4))))
def test_the_smallest_bucket_that_holds_the_context_whichever_instances_there_are(context: int, tps: set[int]) -> None:
    placement = ContextBounds({}).place(request(context), [instance(f"i{tp}", tp) for tp in tps], BUCKETS)
    tp = 1 if context <= 100 else 2 if context <= 1000 else 4
    assert placement == Placement(f"rollout:tp{tp}", f"tcp://i{tp}" if tp in tps else None)


def test_a_context_beyond_every_bound_is_an_error() -> None:
    with pytest.raises(ValueError, match="no bucket holds a context of 101 tokens"):
        ContextBounds({}).place(request(101), [], BUCKETS[:1])


def test_a_trajectory_stays_where_its_kv_is_unless_that_is_much_more_loaded() -> None:
    policy = ContextBounds({"margin": 0.5})
    near = [instance("a", 1, 150), instance("b", 1, 50)]
    assert policy.place(request(50, "tcp://a"), near, BUCKETS).address == "tcp://a"
    far = [instance("a", 1, 900), instance("b", 1, 50)]
    assert policy.place(request(50, "tcp://a"), far, BUCKETS).address == "tcp://b"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"kind": "context_bounds", "slack": 1}, "policy.slack"),
        ({"kind": "no.such:Policy"}, "cannot be imported"),
        ({"kind": "libra.resources.types:Bucket"}, "is no bucket policy"),
    ],
)
def test_a_wrong_policy_is_a_config_error_that_names_it(config: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_policy(config)


def table(*instances: tuple[str, int]) -> RoutingTable:
    result = RoutingTable(ContextBounds({}), BUCKETS)
    for name, tp in instances:
        result.offer(f"tcp://{name}", name, tp, 8)
    return result


def test_first_segments_spread_over_the_instances_of_a_bucket() -> None:
    routes = table(("a", 1), ("b", 1))
    for number in range(6):
        routes.open(f"g0m{number}", "p0", 40, returns=0)
        routes.place(f"g0m{number}")
    assert [(i.sequences, i.tokens) for i in routes.instances.values()] == [(3, 120), (3, 120)]


def test_a_growing_trajectory_moves_up_and_its_old_instance_is_named_once() -> None:
    routes = table(("a", 1), ("b", 2))
    routes.open("g0m0", "p0", 40, returns=0)
    assert routes.place("g0m0") == (Placement("rollout:tp1", "tcp://a"), None)
    routes.returned("g0m0", 0, OK, 90)
    assert routes.place("g0m0") == (Placement("rollout:tp1", "tcp://a"), None)
    routes.returned("g0m0", 1, OK, 500)
    assert routes.place("g0m0") == (Placement("rollout:tp2", "tcp://b"), "tcp://a")
    assert [(i.sequences, i.tokens) for i in routes.instances.values()] == [(0, 0), (1, 500)]


def test_a_repeated_tool_call_replaces_what_the_first_run_reported() -> None:
    routes = table(("a", 1))
    routes.returned("g0m0", 0, OK, 50)
    routes.returned("g0m0", 0, ToolState("search", 3, "busy"), 60)
    assert [state.size for state in routes.routes["g0m0"].history] == [3]


def test_what_a_lost_worker_held_is_gone() -> None:
    routes = table(("a", 1))
    routes.offer_tool("tcp://t")
    routes.open("g0m0", "p0", 40, returns=0)
    routes.place("g0m0")
    assert routes.session("g0m0") == "tcp://t"
    routes.withdraw("tcp://a")
    routes.withdraw("tcp://t")
    assert routes.place("g0m0") == (Placement("rollout:tp1"), None)
    assert routes.session("g0m0") is None
    routes.offer_tool("tcp://t2")
    assert routes.session("g0m0") == "tcp://t2"


def test_a_trajectory_that_ended_leaves_nothing() -> None:
    routes = table(("a", 1))
    routes.offer_tool("tcp://t")
    routes.open("g0m0", "p0", 40, returns=0)
    routes.place("g0m0")
    routes.session("g0m0")
    assert routes.end([("g0m0", 90), ("g9m9", None)]) == {"tcp://a": ["g0m0"], "tcp://t": ["g0m0"]}
    assert not routes.routes
    assert routes.tools == {"tcp://t": 0}
    assert routes.instances["tcp://a"].tokens == 0


def staging(*instances: tuple[str, int]) -> RoutingTable:
    result = RoutingTable(ContextBounds({}), BUCKETS, staging=True)
    for name, tp in instances:
        result.offer(f"tcp://{name}", name, tp, 8)
    result.open("g0m0", "p0", 40, returns=0)
    result.place("g0m0")
    return result


def names(routes: RoutingTable) -> list[str]:
    return [instance.name for instance in routes.sources("g0m0")[0]]


def test_an_instance_keeps_staged_kv_until_a_segment_has_ended_elsewhere() -> None:
    routes = staging(("a", 1), ("b", 2))
    assert names(routes) == routes.arrived("g0m0") == []
    routes.returned("g0m0", 0, OK, 500)
    assert routes.place("g0m0") == (Placement("rollout:tp2", "tcp://b"), None)
    assert names(routes) == ["a"]
    assert routes.place("g0m0") == (Placement("rollout:tp2", "tcp://b"), None)  # the segment is placed again
    assert names(routes) == ["a"]
    assert routes.arrived("g0m0") == ["tcp://a"]
    assert names(routes) == routes.arrived("g0m0") == []


def test_whoever_may_still_hold_staged_kv_is_told_of_the_end() -> None:
    routes = staging(("a", 1), ("b", 2), ("c", 4))
    for turn, context in enumerate((500, 2000)):
        routes.returned("g0m0", turn, OK, context)
        routes.place("g0m0")
    assert names(routes) == ["b", "a"]  # the likeliest first
    assert routes.end([("g0m0", None)]) == {f"tcp://{name}": ["g0m0"] for name in "cab"}


def test_a_trajectory_that_comes_back_finds_its_kv_at_home_and_a_lost_instance_holds_none() -> None:
    routes = staging(("a", 1), ("b", 2), ("c", 4))
    for turn, context in enumerate((500, 2000, 90)):
        routes.returned("g0m0", turn, OK, context)
        routes.place("g0m0")
    assert names(routes) == ["c", "b"]  # and at a, where it is again
    routes.withdraw("tcp://c")
    assert names(routes) == ["b"]
    routes.withdraw("tcp://b")
    assert routes.arrived("g0m0") == []


def test_a_retired_instance_keeps_staged_kv_for_those_that_were_there_until_they_have_arrived() -> None:
    routes = staging(("a", 1), ("b", 1))
    home = "a" if routes.instances["tcp://a"].sequences else "b"
    other = "b" if home == "a" else "a"
    routes.retire(f"tcp://{home}")
    assert routes.arrived("g0m0") == []  # the segment that was cut short has ended
    assert routes.place("g0m0") == (Placement("rollout:tp1", f"tcp://{other}"), None)
    assert names(routes) == [home]
    assert routes.arrived("g0m0") == [f"tcp://{home}"]


def test_kv_outlives_an_engine_that_is_restarted_and_a_role_that_is_changed() -> None:
    routes = staging(("a", 1), ("b", 2))
    routes.retire("tcp://a")
    routes.offer("tcp://a", "a", 1, 8)  # the engine is back
    assert names(routes) == ["a"]
    assert routes.place("g0m0") == (Placement("rollout:tp1", "tcp://a"), None)
    assert names(routes) == []  # it is where its KV is
    routes.retire("tcp://a")
    routes.offer_tool("tcp://a")
    routes.retire("tcp://a")
    routes.returned("g0m0", 0, OK, 500)
    assert routes.place("g0m0") == (Placement("rollout:tp2", "tcp://b"), None)
    assert names(routes) == ["a"]
    assert routes.end([("g0m0", None)]) == {"tcp://b": ["g0m0"], "tcp://a": ["g0m0"]}


def test_a_retired_instance_that_ends_or_that_stages_nothing_is_gone() -> None:
    routes = staging(("a", 1))
    routes.retire("tcp://a")
    routes.withdraw("tcp://a")
    assert names(routes) == []
    assert not routes.retired
    plain = table(("a", 1))
    plain.open("g0m0", "p0", 40, returns=0)
    plain.place("g0m0")
    plain.retire("tcp://a")
    assert not plain.retired
    assert plain.routes["g0m0"].instance is None


def test_an_answer_that_is_no_placement_is_refused() -> None:
    class Wrong(ContextBounds):
        def place(self, *_: object) -> Placement:  # type: ignore[override]
            return Placement("rollout:tp1", "tcp://b")

    routes = RoutingTable(Wrong({}), BUCKETS)
    routes.offer("tcp://b", "b", 2, 8)
    routes.open("g0m0", "p0", 40, returns=0)
    with pytest.raises(ValueError, match="instance 'tcp://b' for rollout:tp1"):
        routes.place("g0m0")


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "return", "place", "end", "lose", "join"]), st.integers(0, 3)), max_size=60
    )
)
def test_an_instances_load_is_the_sum_over_the_trajectories_that_it_holds(actions: list[tuple[str, int]]) -> None:
    routes = table(("i0", 1), ("i1", 1), ("i2", 2))
    for turn, (action, number) in enumerate(actions):
        name = f"g0m{number}"
        if action == "open":
            routes.open(name, "p0", 30, returns=0)
        elif action == "return":
            routes.returned(name, turn, OK, 60 + turn * 10)
        elif action == "place" and name in routes.routes:
            routes.place(name)
        elif action == "end":
            routes.end([(name, None)])
        elif action == "lose":
            routes.withdraw(f"tcp://i{number}")
        elif action == "join" and f"tcp://i{number}" not in routes.instances:
            routes.offer(f"tcp://i{number}", f"i{number}", 1 + number // 2, 8)
        for address, held in routes.instances.items():
            mine = [route.held for route in routes.routes.values() if route.instance == address]
            assert (held.sequences, held.tokens) == (len(mine), sum(mine))


class Learner(ContextBounds):
    """Remembers what it was taught."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked: list[PlacementRequest] = []
        self.taught: list[FinishedTrajectory] = []

    def place(self, request, instances, buckets):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        return super().place(request, instances, buckets)

    def observe(self, finished: FinishedTrajectory) -> None:
        self.taught.append(finished)


def test_the_policy_is_told_the_prompt_and_learns_from_the_final_context() -> None:
    policy = Learner()
    routes = RoutingTable(policy, BUCKETS)
    routes.offer("tcp://a", "a", 1, 8)
    for member in ("g4m0", "g4m1"):
        routes.open(member, "p7", 40, returns=0)
        routes.place(member)
        routes.returned(member, 0, OK, 80)
        routes.place(member)
    routes.end([("g4m0", 95), ("g4m1", None)])  # its last segment had 15 tokens; the other one failed
    assert {request.prompt for request in policy.asked} == {"p7"}
    assert [(f.trajectory, f.prompt, f.context, list(f.history)) for f in policy.taught] == [
        ("g4m0", "p7", 95, [OK]),
        ("g4m1", "p7", None, [OK]),
    ]
