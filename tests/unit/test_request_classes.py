"""Request classes while a run runs: prefill shares by domain, followed as they drift, and the kind each goes to."""

from __future__ import annotations

from typing import Any

import pytest

from libra.resources.cost_model.rollout import step_cost
from libra.resources.errors import ConfigError
from libra.resources.specs import load_hardware, load_model
from libra.resources.tags import hardware_of
from libra.resources.types import Bucket, RequestRecord
from libra.scheduler_plugin.planner.classes import DomainShares, classify
from libra.scheduler_plugin.planner.online import Online, OnlineConfig, WorkerDevice
from libra.scheduler_plugin.planner.replan import Seen
from libra.scheduler_plugin.planner.routing import buckets_of
from libra.scheduler_plugin.roles import Duty

STEP = step_cost(load_model("Qwen3-8B"), load_hardware("h20"), 1)


def reads(i: int, domain: str = "search") -> RequestRecord:
    """Much is read, little said."""
    return RequestRecord.from_turns(f"g{i}m0", 24_000 + i, [(200, 0, 0.0)], domain)


def says(i: int, domain: str = "math") -> RequestRecord:
    """The reverse."""
    return RequestRecord.from_turns(f"g{i}m1", 200, [(6_000 + i, 0, 0.0)], domain)


def mixed(i: int) -> RequestRecord:
    return RequestRecord.from_turns(f"g{i}m2", 4_000, [(1_500, 2_000, 1.0), (500, 0, 0.0)], "code")


def test_shares_are_of_domains_decode_heavy_ones_first() -> None:
    shares = DomainShares()
    shares.observe([*map(reads, range(8)), *map(says, range(8))], STEP)
    assert list(shares.shares) == ["math", "search"]
    assert 0 < shares.shares["math"] < 0.1 < 0.5 < shares.shares["search"] < 1


def test_a_domain_that_drifts_is_followed_and_one_that_is_silent_stays() -> None:
    shares = DomainShares()
    for _ in range(5):
        shares.observe([*map(reads, range(8)), *map(says, range(8))], STEP)
    before = shares.shares
    for _ in range(20):
        shares.observe([says(i, "search") for i in range(8)], STEP)
    assert shares.shares["search"] < 0.1
    assert shares.shares["math"] == before["math"]


def test_running_shares_decide_the_order_of_whole_domains() -> None:
    batch = [*map(reads, range(4)), *map(says, range(4)), *map(mixed, range(4))]
    assert [c.name for c in classify(batch, STEP)] == ["math", "code", "search"]
    running = {"search": 0.01, "math": 0.5, "code": 0.2}
    assert [c.name for c in classify(batch, STEP, running)] == ["search", "code", "math"]


def test_ranges_of_a_domain_cover_every_context() -> None:
    classes = classify([says(i) for i in range(40)], STEP)
    assert len(classes) == 4
    assert sum(len(c.records) for c in classes) == 40
    assert sum(c.upto is None for c in classes) == 1


CONFIG: dict[str, Any] = {
    "enabled": True, "model": "Qwen3-8B", "hardware": "h800", "train": "move",
    "replan": {"interval": 1, "confirm": 1, "cool_down": 2, "switch_seconds": 0.1, "minimum_gain": 0.01},
}  # fmt: skip


def workers() -> list[WorkerDevice]:
    """Four H800 of which two train, and four H20, of which the plugin knows by their label."""
    found = []
    for i in range(8):
        duty = Duty("train") if i < 2 else Duty("rollout", 1)
        found.append(WorkerDevice(f"w{i}", "first" if i < 4 else "second", True, duty, None if i < 4 else "h20"))
    return found


def test_a_worker_says_which_hardware_it_is() -> None:
    assert hardware_of({"capable:rollout": 8.0, "hardware:h20": 1.0}) == "h20"
    assert hardware_of({"capable:rollout": 8.0}) is None


def test_the_plan_says_which_class_goes_to_which_kind() -> None:
    made = Online(OnlineConfig.model_validate(CONFIG), workers())
    batch = (*map(reads, range(16)), *map(says, range(16)), *map(mixed, range(16)))
    seen = Seen(1, 200.0, batch, 50.0)
    made.saw(seen)
    plan = made.figures(seen, made.window()).candidate
    assert plan is not None
    classes = made.classes(plan)
    assert set(classes) == {"math", "code", "search"}
    assert classes["math"] == "h20", "what is decode-heavy goes where the bandwidth is"
    assert set(made.duties(plan)) == {f"w{i}" for i in range(8)}
    assert all(bucket.max_context is None for bucket in buckets_of(plan))
    assert isinstance(buckets_of(plan)[0], Bucket)


def test_before_the_first_plan_every_kind_serves_whatever_comes() -> None:
    made = Online(OnlineConfig.model_validate(CONFIG), workers())
    current = made.replanner.current
    assert {part.kind: part.classes for part in current.rollout} == {"h20": ("all",), "h800": ("all",)}
    train, rollout = made.planner.evaluate(current, [says(i) for i in range(32)])
    assert 0 < train < float("inf")
    assert 0 < rollout < float("inf")


@pytest.mark.parametrize(
    ("changes", "says_so"),
    [
        ({"train": "fixed"}, r"of several kinds \(h800, h20\) and planner.train is 'fixed'"),
        ({"planner": {"split_prefill": True}}, "in 'libra plan' only"),
    ],
)
def test_what_several_kinds_cannot_do_is_refused(changes: dict[str, Any], says_so: str) -> None:
    with pytest.raises(ConfigError, match=says_so):
        Online(OnlineConfig.model_validate({**CONFIG, **changes}), workers())


def test_ranks_on_two_kinds_are_refused() -> None:
    found = workers()
    found[7] = WorkerDevice("w7", "second", True, Duty("train"), "h20")
    with pytest.raises(ConfigError, match="training ranks are on h20, h800"):
        Online(OnlineConfig.model_validate(CONFIG), found)
