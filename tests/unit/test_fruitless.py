"""Why groups gave nothing to learn from, in the words that end a run."""

from __future__ import annotations

from libra.pipeline.run.fruitless import Fruitless


def test_the_commonest_failure_is_named_with_its_count_whoever_it_befell() -> None:
    seen = Fruitless()
    for member in range(5):
        seen.ended(f"g0m{member}", f"task failure: the reward of g0m{member} is nan")
    seen.ended("g1m0", "infra failure: no room")
    seen.ended("g1m1", None)
    message = seen.message(2)
    assert message.startswith("2 groups in a row (groups.max_returned) gave nothing to learn from: 6 of their 7 ")
    assert "most often (5 times) so: task failure: the reward of a trajectory is nan" in message
    assert "too hard" not in message


def test_equal_rewards_are_the_policy_s_or_the_tasks_matter() -> None:
    seen = Fruitless()
    seen.ended("g0m0", "task failure: long ago")
    seen.reset()
    for member in range(4):
        seen.ended(f"g1m{member}", None)
    assert "too hard or too easy" in seen.message(1)
    assert "failed" not in seen.message(1)
    seen.ended("g2m0", "task failure: once")
    assert "1 trajectories failed, most often (1 times) so: task failure: once" in seen.message(1)
