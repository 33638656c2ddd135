"""Outages: what a run's report says of workers that were lost and came back."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libra.pipeline.view.events import RoleChanged
from libra.pipeline.view.restarts import KEPT, Outage, Restarts


def change(restarts: Restarts, at: float, worker: str, state: str, error: str | None = None) -> None:
    restarts.role_changed(RoleChanged(1000.0 + at, worker, "rollout", state, error), at)


def test_an_outage_names_the_engines_own_words_and_lasts_until_the_worker_is_back() -> None:
    restarts = Restarts()
    change(restarts, 5, "rollout-0", "ready")
    restarts.worker_gone("rollout-0", "the rollout worker is gone", 9)
    change(restarts, 9, "rollout-0", "lost", "vLLM is dead: its process ended without a word (killed?)")
    change(restarts, 10, "rollout-0", "starting")
    change(restarts, 12, "rollout-0", "failed", "no memory")
    change(restarts, 40, "rollout-0", "ready")

    reason = "vLLM is dead: its process ended without a word (killed?)"
    assert restarts.outages == [Outage("rollout-0", "rollout", 9, reason, seconds=31)]


def test_a_worker_that_is_gone_without_a_word_is_said_to_be_gone() -> None:
    restarts = Restarts()
    change(restarts, 5, "rollout-0", "ready")
    restarts.worker_gone("rollout-0", "the rollout worker is gone", 9)
    assert restarts.outages == [Outage("rollout-0", "rollout", 9, "the rollout worker is gone", seconds=None)]


def test_a_first_start_that_fails_and_a_role_that_ends_as_told_are_no_outages() -> None:
    restarts = Restarts()
    change(restarts, 1, "rollout-0", "failed", "no such model")
    change(restarts, 2, "rollout-1", "ready")
    change(restarts, 3, "rollout-1", "stopped")
    change(restarts, 4, "rollout-1", "failed", "it had ended already")
    restarts.worker_gone("trainer", "the optimizer step failed", 5)
    assert restarts.count == 0


def test_a_resumed_run_goes_on_counting() -> None:
    before = Restarts()
    change(before, 1, "rollout-0", "ready")
    change(before, 2, "rollout-0", "lost", "killed")
    after = Restarts()
    after.restore(before.count, before.plain())
    change(after, 8, "rollout-0", "ready")  # of another cluster: that one never came back
    change(after, 9, "rollout-0", "lost", "killed again")
    assert [(outage.reason, outage.seconds) for outage in after.outages] == [("killed", None), ("killed again", None)]
    assert after.count == 2


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ready", "lost", "failed", "stopped", "gone"])))


@given(STEPS)
def test_every_loss_of_a_ready_worker_is_counted_once(steps: list[tuple[str, str]]) -> None:
    restarts, ready, losses = Restarts(), set[str](), 0
    for at, (worker, state) in enumerate(steps):
        losses += worker in ready and state in ("lost", "failed", "gone")
        (ready.add if state == "ready" else ready.discard)(worker)
        if state == "gone":
            restarts.worker_gone(worker, "gone", at)
        else:
            change(restarts, at, worker, state, "why")
    assert restarts.count == losses == len(restarts.outages)
    assert all(outage.seconds is None or outage.seconds > 0 for outage in restarts.outages)


def test_memory_is_bounded() -> None:
    restarts = Restarts()
    for at in range(0, 4 * KEPT, 2):
        change(restarts, at, "rollout-0", "ready")
        change(restarts, at + 1, "rollout-0", "lost", "again")
    told: list[Any] = restarts.plain()
    assert len(told) == KEPT
    assert restarts.count == 2 * KEPT
