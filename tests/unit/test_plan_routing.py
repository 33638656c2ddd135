"""The policy that replanning puts around the configured one: it decides only in a mixed layout, and hides nothing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.planner.routing import PlanRouting
from libra.scheduler_plugin.policy.base import BucketPolicy, Placement, PlacementRequest


class Listener(BucketPolicy):
    """Puts everything under ``rollout:tp1`` and notes what it is told."""

    def __init__(self) -> None:
        super().__init__({})
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        return Placement("rollout:tp1")

    def __getattribute__(self, name: str) -> Any:
        if name in _TOLD:
            return lambda *arguments: self.told.append((name, arguments))
        return super().__getattribute__(name)


_TOLD = {name for name, _ in inspect.getmembers(BucketPolicy, inspect.isfunction)} - {"__init__", "place"}


@pytest.mark.parametrize("name", sorted(_TOLD))
def test_whatever_the_routing_table_tells_a_policy_reaches_the_one_inside(name: str) -> None:
    inner = Listener()
    outer = PlanRouting(inner)
    arguments = tuple(object() for _ in list(inspect.signature(getattr(BucketPolicy, name)).parameters)[1:])

    getattr(outer, name)(*arguments)

    assert inner.told == [(name, arguments)]


@pytest.mark.parametrize(
    ("bounds", "tag"),
    [((512, None), "rollout:tp1"), ((None, None), "rollout:tp2")],
    ids=["bounded buckets: the policy's choice", "a mixed bucket: the least loaded"],
)
def test_it_decides_only_where_every_bucket_is_unbounded(bounds: tuple[int | None, ...], tag: str) -> None:
    buckets = [Bucket(tp, bound) for tp, bound in zip((1, 2), bounds, strict=True)]
    instances = [RolloutInstance("a", "a", 1, 4, 3, 900), RolloutInstance("b", "b", 2, 4, 1, 100)]
    request = PlacementRequest("s1/g0/m0", "p", 10, (), None)

    assert PlanRouting(Listener()).place(request, instances, buckets).tag == tag
