"""The baseline policies, each by what makes it that policy."""

import pytest

from libra.resources.types import Bucket, RolloutInstance, ToolState
from libra.scheduler_plugin.policy.base import BucketPolicy, FinishedTrajectory, PlacementRequest
from libra.scheduler_plugin.policy.embedding_like import EmbeddingLike, EmbeddingLikeConfig, PromptSample
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.policy.length_threshold import LengthThreshold
from libra.scheduler_plugin.policy.mlfq import Mlfq
from libra.scheduler_plugin.policy.oracle import Oracle

BUCKETS = (Bucket(1, 4_000), Bucket(2, 12_000), Bucket(4, 40_000))
SHORT = RolloutInstance("tcp://a:1", "short", 1, 64, 2, 2_000)
MIDDLE = RolloutInstance("tcp://a:2", "middle", 2, 64, 2, 9_000)
LONG = RolloutInstance("tcp://a:4", "long", 4, 64, 2, 9_000)
INSTANCES = (SHORT, MIDDLE, LONG)
STATE = ToolState("test", 0, "ok")


def placed(policy: BucketPolicy, context: int, current: RolloutInstance | None = None, name: str = "g0m0") -> str:
    history = [] if current is None else [STATE]
    request = PlacementRequest(
        name, name.partition("m")[0], context, history, None if current is None else current.address
    )
    return policy.place(request, INSTANCES, BUCKETS).tag.removeprefix("rollout:")


def test_mlfq_promotes_what_outgrew_its_bucket_and_never_demotes():
    policy = Mlfq({})
    assert placed(policy, 500) == "tp1"
    assert placed(policy, 4_000, SHORT) == "tp1"
    assert placed(policy, 4_001, SHORT) == "tp2"
    assert placed(policy, 500, LONG) == "tp4"


def test_length_threshold_promotes_early():
    policy = LengthThreshold({"share": 0.5})
    assert placed(policy, 2_000, SHORT) == "tp1"
    assert placed(policy, 2_001, SHORT) == "tp2"
    assert placed(policy, 6_001, MIDDLE) == "tp4"
    assert placed(policy, 30_000, LONG) == "tp4"


def test_least_loaded_ignores_lengths_and_stays_within_the_margin():
    policy = LeastLoaded({"balance_margin": 0.5})
    # Tokens a device: 2,000, 4,500 and 2,250.
    assert placed(policy, 500) == "tp1"
    assert placed(policy, 5_000) == "tp4"
    assert placed(policy, 500, LONG) == "tp4"
    assert placed(policy, 500, MIDDLE) == "tp1"


def test_the_oracle_knows_the_recorded_and_no_others():
    policy = Oracle({"final": {"g0m0": 9_000, "g0m1": 39_000}})
    assert (placed(policy, 500), placed(policy, 500, name="g0m1")) == ("tp2", "tp4")
    assert placed(policy, 600, SHORT) == "tp2"
    with pytest.raises(ValueError, match="not g9m9"):
        placed(policy, 500, name="g9m9")


def test_embedding_like_guesses_from_the_prompt_and_keeps_the_guess():
    samples = [PromptSample(f"g{n % 2}", 500, 1_500 if n % 2 == 0 else 20_000) for n in range(40)]
    policy = EmbeddingLike(EmbeddingLikeConfig.fit(samples).model_dump())
    assert (placed(policy, 500, name="g0m1"), placed(policy, 500, name="g1m1")) == ("tp1", "tp4")
    # Whatever the returns say.
    assert placed(policy, 900, SHORT, name="g0m1") == "tp1"
    assert placed(policy, 5_000, SHORT, name="g0m1") == "tp2"
    policy.observe(FinishedTrajectory("g0m1", "g0", 30_000, [STATE]))
    assert placed(policy, 500, name="g0m2") == "tp1"


@pytest.mark.parametrize("policy", [Mlfq({}), LengthThreshold({}), LeastLoaded({}), Oracle({"final": {"g0m0": 1}})])
def test_a_context_that_no_bucket_holds_is_refused_by_name(policy):
    with pytest.raises(ValueError, match=r"context of 40001 tokens.*tp 4: 40000.*raise the last bucket's bound"):
        placed(policy, 40_001, LONG)
