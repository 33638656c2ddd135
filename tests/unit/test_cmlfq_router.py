from dataclasses import replace

import pytest

from libra.resources.types import Bucket, InstanceFacts, KVRoom, RolloutInstance
from libra.scheduler_plugin.cmlfq.cost import CostConfig, CostModel
from libra.scheduler_plugin.cmlfq.estimate import Estimate
from libra.scheduler_plugin.cmlfq.router import Decision, Router, RouterConfig, Standing
from libra.scheduler_plugin.policy.moves import MoveOutcome

BUCKETS = (Bucket(1, 4_000), Bucket(2, 12_000), Bucket(4, None))
SHORT = RolloutInstance("tcp://a:1", "short", 1, 256, 10, 20_000)
MIDDLE = RolloutInstance("tcp://a:2", "middle", 2, 256, 10, 20_000)
LONG = RolloutInstance("tcp://b:3", "long", 4, 256, 10, 20_000)
INSTANCES = (SHORT, MIDDLE, LONG)
FAST = CostConfig(host_bandwidth="20 GB", network_bandwidth="16 GB")
AT = Standing(context=1_000, current=SHORT, address=SHORT.address, moves=0, rested=5, first=False)


def guess(mean: float, p90: float) -> Estimate:
    return Estimate(mean, p90, (mean,), evidence=50, depth=3, source="both")


def decide(
    at: Standing,
    estimate: Estimate | None,
    config: RouterConfig | None = None,
    costs: CostConfig | None = None,
    before: dict[int, float] | None = None,
    instances: tuple[RolloutInstance, ...] = INSTANCES,
) -> Decision:
    router = Router(config or RouterConfig(), CostModel(costs or FAST))
    return router.decide(at, estimate, instances, BUCKETS, before or {})


def test_the_first_segment_goes_to_the_shortest_bucket_that_fits_the_prompt():
    first = Standing(context=1_000, current=None, address=None, moves=0, rested=0, first=True)
    assert (decide(first, guess(20_000, 30_000)).bucket, decide(first, None).reason) == (0, "entry")
    assert decide(replace(first, context=4_001), None).bucket == 1


def test_a_move_needs_mean_and_p90_in_one_bucket():
    assert decide(AT, None).reason == "no evidence"
    assert decide(AT, guess(3_000, 9_000)).reason == "split"
    assert decide(AT, guess(2_000, 3_000)).reason == "agrees"
    moved = decide(AT, guess(15_000, 30_000))
    assert (moved.reason, moved.bucket, moved.instance) == ("predicted", 2, LONG)


def test_it_is_the_final_context_that_counts_not_what_remains():
    # 3,000 tokens are left: as a length that is the first bucket, from 14,000 on it is the last one.
    held = replace(AT, context=14_000, current=LONG, address=LONG.address)
    assert decide(held, guess(17_000, 17_500)).reason == "agrees"


def test_demotion_when_less_is_left_than_was_feared():
    held = replace(AT, current=LONG, address=LONG.address)
    found = decide(held, guess(2_000, 3_000), before={4: 500.0})
    assert (found.reason, found.bucket) == ("predicted", 0)


def test_a_context_that_outgrew_its_bucket_is_promoted_whatever_the_estimate():
    grown = replace(AT, context=4_500)
    assert (decide(grown, None).reason, decide(grown, None).bucket) == ("forced", 1)
    assert decide(grown, guess(5_000, 20_000)).bucket == 1
    straight = decide(grown, guess(15_000, 30_000))
    assert (straight.reason, straight.bucket) == ("forced", 2)
    # It has to move, so it goes as far as both are sure of, though they do not agree.
    assert decide(replace(grown, context=4_500), guess(11_000, 13_000)).bucket == 1
    assert decide(grown, guess(13_000, 30_000)).bucket == 2
    # A last bucket with hours of work before it is no place to hurry to.
    assert decide(grown, guess(15_000, 30_000), before={4: 9_000.0}).bucket == 1


def test_a_bucket_whose_kv_cannot_hold_it_is_never_chosen():
    small = CostConfig(kv_tokens={1: 270_000, 2: 8_000, 4: 25_000})
    assert decide(AT, guess(6_000, 9_000), costs=small).reason == "full"
    assert decide(AT, guess(6_000, 7_000), costs=small).bucket == 1
    assert decide(AT, guess(15_000, 30_000), costs=small).bucket == 0
    grown = replace(AT, context=10_000)
    assert decide(grown, None, costs=small).bucket == 2
    with pytest.raises(ValueError, match=r"no bucket's KV holds a context of 30000 tokens.*larger TP"):
        decide(replace(AT, context=30_000), None, costs=small)


def test_ping_pong_is_damped():
    near = guess(4_100, 5_000)
    assert decide(AT, near).reason == "predicted"
    assert decide(replace(AT, moves=1), near).reason == "damped"
    assert decide(replace(AT, moves=1), guess(4_500, 5_000)).reason == "predicted"
    assert decide(replace(AT, rested=0), guess(8_000, 9_000)).reason == "damped"
    assert decide(replace(AT, moves=4), guess(8_000, 9_000)).reason == "damped"
    down = replace(AT, current=MIDDLE, address=MIDDLE.address, moves=2)
    assert decide(down, guess(3_000, 3_900), before={2: 900.0}).reason == "damped"


def test_a_move_that_does_not_pay_is_not_made():
    strict = RouterConfig(slack=0.0)
    long = guess(15_000, 20_000)
    assert decide(AT, long, strict).reason == "predicted"
    full = decide(AT, long, strict, before={4: 4_000.0})
    assert full.reason == "dear" and full.instance is SHORT and full.saves < 0
    # A link so slow that both ways of getting the KV there take longer than what is gained.
    slow = CostConfig(network_bandwidth=1_000, prefill_rate={1: 1.0})
    assert decide(AT, long, strict, slow).reason == "dear"


def test_a_bucket_with_no_ready_instance_is_not_moved_to_but_waited_for_when_forced():
    assert decide(AT, guess(6_000, 9_000), instances=(SHORT, LONG)).reason == "full"
    forced = decide(replace(AT, context=4_500), None, instances=(SHORT, LONG))
    assert (forced.bucket, forced.instance) == (1, None)


def test_within_a_bucket_it_stays_where_its_kv_is_unless_the_load_differs_by_the_margin():
    other = RolloutInstance("tcp://a:9", "other", 1, 256, 1, 2_000)
    both = (SHORT, MIDDLE, LONG, other)
    near = replace(AT, current=replace(SHORT, tokens=4_000))
    assert decide(near, guess(2_000, 3_000), instances=(near.current or SHORT, other)).instance is near.current
    assert decide(AT, guess(2_000, 3_000), instances=both).instance is other


def test_lost_kv_is_placed_anew_where_it_belongs():
    lost = replace(AT, current=None, address=None)
    found = decide(lost, guess(15_000, 20_000))
    assert (found.reason, found.bucket) == ("lost", 2)
    assert found.move is not None and found.move.way == "prefill"


def test_fetch_or_prefill_by_what_the_link_makes_of_it():
    fast, slow = FAST, CostConfig(network_bandwidth="10 MB")
    same_node = CostModel(fast).move(8_000, SHORT.address, MIDDLE)
    across = CostModel(fast).move(8_000, SHORT.address, LONG)
    throttled = CostModel(slow).move(8_000, SHORT.address, LONG)
    assert (same_node.way, across.way, throttled.way) == ("load", "fetch", "prefill")
    assert across.fetch is not None and across.prefill is not None and across.seconds == across.fetch < across.prefill
    assert throttled.fetch is not None and throttled.seconds == throttled.prefill < throttled.fetch
    assert CostModel(fast).move(8_000, LONG.address, LONG).way == "hit"
    # Two labels on one host, as in a test of two nodes on one machine.
    labels = CostConfig(nodes={SHORT.address: "x", MIDDLE.address: "y"}, network_bandwidth="10 MB")
    assert CostModel(labels).move(8_000, SHORT.address, MIDDLE).way == "prefill"


def test_the_rates_follow_what_was_measured():
    costs = CostModel(CostConfig(network_bandwidth="10 GB", host_bandwidth="20 GB", move_latency=0.0))
    assert costs.move(8_000, SHORT.address, LONG).way == "fetch"
    size = 8_000 * costs.kv_bytes_per_token
    for _ in range(200):
        costs.measured(MoveOutcome("fetch", 8_000, 4, size / costs.host_bandwidth + size / 50e6))
    assert costs.network_bandwidth == pytest.approx(50e6, rel=0.1)
    assert costs.move(8_000, SHORT.address, LONG).way == "prefill"
    before = costs.work_seconds(4, 0, 1_000)
    for _ in range(200):
        costs.measured(MoveOutcome("prefill", 8_000, 4, 80.0))
    assert costs.prefill_rate[4] == pytest.approx(100, rel=0.1)
    assert costs.work_seconds(4, 0, 1_000) > before
    assert costs.move(8_000, SHORT.address, LONG).way == "fetch"
    assert costs.move(8_000, SHORT.address, LONG).prefill == pytest.approx(80, rel=0.1)


def test_what_instances_tell_prices_moves_and_bounds_buckets_and_options_override_it():
    def of(name: str, tp: int, node: str, tokens: int, size: int = 1_000) -> RolloutInstance:
        return RolloutInstance(f"tcp://host:{name}", name, tp, 8, 0, 0, InstanceFacts(node, KVRoom(tokens, size)))

    a, b, c, d = of("a", 1, "left", 5_000), of("b", 1, "left", 4_000), of("c", 2, "right", 9_000), of("d", 2, "", 9_000)
    costs = CostModel(CostConfig(host_bandwidth="1 GB", network_bandwidth="1 MB"))
    assert costs.holds(1, 10**9)
    costs.see((a, b, c, d))
    assert (costs.kv_tokens, costs.kv_bytes_per_token) == ({1: 4_000, 2: 9_000}, 1_000)
    assert not costs.holds(1, 4_001)
    near, far = costs.move(2_000, a.address, b), costs.move(2_000, a.address, c)
    # Two labels on one host are two nodes; one megabyte a second is slower than prefilling.
    assert (near.way, near.seconds, far.way) == ("load", 0.002, "prefill")
    assert far.fetch == pytest.approx(0.01 + 2.0 + 0.002)
    assert costs.node(d.address) == "host"
    costs.see((a, c))
    assert costs.kv_tokens == {1: 5_000, 2: 9_000}
    assert costs.node(b.address) == "left"  # it has gone, but KV may still lie there
    told = CostModel(CostConfig(kv_bytes_per_token=7, kv_tokens={1: 50}, nodes={c.address: "left"}))
    told.see((a, c))
    assert (told.kv_tokens, told.kv_bytes_per_token, told.node(c.address)) == ({1: 50, 2: 9_000}, 7, "left")


def test_a_rate_that_was_only_assumed_gives_way_to_the_first_measurement():
    costs = CostModel(CostConfig(move_latency=0.0))
    before = dict(costs.prefill_rate)
    costs.measured(MoveOutcome("prefill", 1_000, 1, 10.0))
    assert costs.prefill_rate[1] == pytest.approx(100)
    assert costs.prefill_rate[4] / costs.prefill_rate[1] == pytest.approx(before[4] / before[1])
    costs.measured(MoveOutcome("load", 1_000, 1, 1.0))
    assert costs.host_bandwidth == pytest.approx(1_000 * costs.kv_bytes_per_token)
    costs.measured(MoveOutcome("load", 1_000, 1, 2.0))
    assert costs.host_bandwidth == pytest.approx(1_000 * costs.kv_bytes_per_token / (0.95 + 0.05 * 2))
    given = CostModel(CostConfig(host_bandwidth="10 GB"))
    given.measured(MoveOutcome("load", 1_000, 1, 1.0))
    assert given.host_bandwidth > 1e9
