"""What becomes of one worker's role, step by step."""

from __future__ import annotations

import pytest

from libra.scheduler_plugin.role_events import (
    Connected,
    Disconnected,
    Drain,
    Drained,
    Event,
    Evict,
    Load,
    Loaded,
    Lost,
    Published,
    Reported,
    RunEnds,
    Start,
    Stop,
    Tick,
    Want,
)
from libra.scheduler_plugin.roles import Duty, Limits, Phase, RoleState, Step, advance

LIMITS = Limits(start=10, load=5, drain=8, stop=3, restarts=2, backoff=1, backoff_most=4, stable=30)
ROLLOUT, TOOL, TRAIN = Duty("rollout", 1), Duty("tool"), Duty("train")


def play(*events: Event | tuple[float, Event], current: int | None = 7, state: RoleState | None = None) -> Step:
    """The last step after ``events``, each at time 0 or at the time given with it."""
    step: Step = (state or RoleState(), ())
    for event in events:
        now, event = event if isinstance(event, tuple) else (0.0, event)
        step = advance(step[0], event, now, LIMITS, current)
    return step


def ready(duty: Duty, version: int | None = 7) -> RoleState:
    """A worker whose role is ready."""
    state, _ = play(Connected(), Want(duty), Reported(1, "ready", version, 4), current=version)
    assert state.phase is Phase.READY
    return state


def test_a_wanted_role_is_started_and_offers_once_it_is_ready() -> None:
    starting, effects = play(Connected(), Want(ROLLOUT))
    assert effects == (Start(1, ROLLOUT),)
    assert not starting.offers
    state, _ = play(Reported(1, "ready", 7, 4), state=starting)
    assert state.offers
    assert state.slots == 4


def test_a_rollout_worker_with_older_weights_loads_the_current_ones_before_it_offers() -> None:
    state, effects = play(Connected(), Want(ROLLOUT), Reported(1, "ready", 6, 4))
    assert effects == (Load(1),)
    assert not state.offers
    state, _ = play(Loaded(1, 7), state=state)
    assert state.offers


def test_without_any_weights_a_rollout_worker_waits_for_the_driver_and_loads_the_first() -> None:
    waiting, _ = play(Connected(), Want(ROLLOUT), (1000.0, Tick()), current=None)
    assert waiting.phase is Phase.STARTING
    state, effects = play(Published(), state=waiting, current=0)
    assert effects == (Load(1),)
    assert state.deadline == LIMITS.start + LIMITS.load
    state, _ = play(Loaded(1, 0), Reported(1, "ready", 0, 4), state=state, current=0)
    assert state.offers


def test_new_weights_are_loaded_while_the_old_ones_go_on_serving() -> None:
    state, effects = play(Published(), state=ready(ROLLOUT), current=8)
    assert effects == (Load(1),)
    assert state.offers
    assert state.version == 7
    state, _ = play(Loaded(1, 8), state=state, current=8)
    assert (state.version, state.deadline) == (8, None)


@pytest.mark.parametrize("event", [Loaded(1, 8, "checksum"), (6.0, Tick())], ids=["fails", "takes too long"])
def test_an_engine_that_does_not_load_is_taken_out_and_restarted(event: Event | tuple[float, Event]) -> None:
    loading, _ = play(Published(), state=ready(ROLLOUT), current=8)
    state, effects = play(event, state=loading, current=8)
    assert effects == (Evict(ROLLOUT), Stop(1))
    assert not state.offers
    assert state.error is not None
    state, _ = play((7.0, Reported(1, "stopped")), state=state, current=8)
    assert state.phase is Phase.FAILED
    _, effects = play((9.0, Tick()), state=state, current=8)
    assert effects == (Start(2, ROLLOUT),)


def test_a_lost_role_is_restarted_with_back_off_and_given_up_after_the_last_restart() -> None:
    state, effects = play(Reported(1, "lost", error="exit code -9"), state=ready(ROLLOUT))
    assert effects == (Lost(ROLLOUT), Evict(ROLLOUT))
    waits = []
    for epoch in (2, 3):
        assert state.deadline is not None
        waits.append(state.deadline)
        state, _ = play((state.deadline, Tick()), state=state)
        state, _ = play((waits[-1], Reported(epoch, "failed", error="exit code 1")), state=state)
    assert waits == [1.0, 1.0 + 2.0]
    assert state.given_up
    assert state.error == "exit code 1"


def test_tasks_of_a_lost_trainer_are_left_to_fail_because_a_restarted_one_has_no_weights() -> None:
    _, effects = play(Reported(1, "lost", error="exit code -9"), state=ready(TRAIN, None))
    assert effects == (Lost(TRAIN),)


def test_another_role_waits_until_the_running_tasks_have_ended_and_the_child_has_stopped() -> None:
    state, effects = play(Want(TOOL), state=ready(ROLLOUT))
    assert (state.phase, effects) == (Phase.DRAINING, (Drain(1, drains=True),))
    assert not state.offers
    state, effects = play(Drained(), state=state)
    assert effects == (Stop(1),)
    state, effects = play(Reported(1, "stopped"), state=state)
    assert effects == (Start(2, TOOL),)


def test_a_drain_that_takes_too_long_ends_the_tasks() -> None:
    draining, _ = play(Want(TOOL), state=ready(ROLLOUT))
    state, effects = play((9.0, Tick()), state=draining)
    assert effects == (Evict(ROLLOUT), Stop(1))
    assert state.error is not None
    assert "running rollout (tp 1) tasks" in state.error


def test_a_role_that_is_wanted_back_while_it_drains_goes_on() -> None:
    state, effects = play(Want(TOOL), Want(ROLLOUT), state=ready(ROLLOUT))
    assert state.offers
    assert effects == (Drain(1, drains=False),)


def test_tasks_of_other_roles_are_not_cut_short() -> None:
    state, effects = play(Want(ROLLOUT), state=ready(TOOL, None))
    assert (state.phase, effects) == (Phase.DRAINING, ())


@pytest.mark.parametrize("phase", ["idle", "starting", "ready", "failed"])
def test_as_the_run_ends_a_worker_frees_what_it_keeps_whatever_it_does(phase: str) -> None:
    states = {
        "idle": play(Connected())[0],
        "starting": play(Connected(), Want(ROLLOUT))[0],
        "ready": ready(ROLLOUT),
        "failed": play(Reported(1, "lost"), state=ready(ROLLOUT))[0],
    }
    epoch = states[phase].epoch
    state, effects = play(RunEnds(), state=states[phase])
    assert effects == ((Evict(ROLLOUT),) if phase == "ready" else ()) + (Stop(epoch, run_ends=True),)
    assert (state.phase, state.deadline) == (Phase.STOPPING, LIMITS.stop)
    ended, effects = play(Reported(epoch, "stopped"), state=state)
    assert (ended.phase, ended.wanted, effects) == (Phase.IDLE, None, ())
    late, _ = play((LIMITS.stop, Tick()), state=state)
    assert late.phase is Phase.IDLE


def test_a_worker_that_comes_back_gets_its_role_again_under_a_new_epoch() -> None:
    state, effects = play(Disconnected(), state=ready(ROLLOUT))
    assert effects == (Lost(ROLLOUT),)
    state, _ = play(Connected(), state=state)
    assert state.phase is Phase.FAILED
    _, effects = play((2.0, Tick()), state=state)
    assert effects == (Start(2, ROLLOUT),)


def test_answers_of_an_earlier_start_change_nothing() -> None:
    state, _ = play(Reported(1, "lost"), (1.0, Tick()), state=ready(ROLLOUT))
    assert state.epoch == 2
    for stale in (Reported(1, "ready", 7), Reported(1, "failed"), Loaded(1, 7), Reported(1, "stopped")):
        assert advance(state, stale, 1.0, LIMITS, 7) == (state, ())
