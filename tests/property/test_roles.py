"""The role state machine against a worker that may do anything: answer late, twice, wrongly, die or say nothing."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libra.scheduler_plugin.role_events import (
    Connected,
    Disconnected,
    Drained,
    Evict,
    Load,
    Loaded,
    Published,
    Reported,
    RunEnds,
    Start,
    Stop,
    Tick,
    Want,
)
from libra.scheduler_plugin.roles import Duty, Limits, Phase, RoleState, advance

LIMITS = Limits(start=10, load=5, drain=8, stop=3, restarts=3, backoff=1, backoff_most=4, stable=30)
DUTIES = (Duty("rollout", 1), Duty("rollout", 2), Duty("tool"), Duty("train"))


class RoleMachine(RuleBasedStateMachine):
    """Keeps, beside the state, what a worker's children would be doing by the commands it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RoleState()
        self.now = 0.0
        self.current: int | None = None
        self.alive: dict[int, Duty] = {}
        """Children by epoch: started, and not yet ended, reported dead, or given up on."""

    def feed(self, event: object) -> None:
        before = self.state
        self.state, effects = advance(before, event, self.now, LIMITS, self.current)  # type: ignore[arg-type]
        assert self.state.epoch >= before.epoch
        if before.phase is Phase.STOPPING and before.deadline is not None and self.now >= before.deadline:
            self.alive.clear()  # given up on
        for effect in effects:
            if isinstance(effect, Start):
                assert not self.alive, f"{effect} while {self.alive} may still run"
                assert effect.epoch > before.epoch
                self.alive[effect.epoch] = effect.duty
            elif isinstance(effect, (Stop, Load)):
                assert effect.epoch == self.state.epoch
            elif isinstance(effect, Evict):
                assert not self.state.offers
        if self.state.phase is Phase.READY and before.phase is Phase.STARTING:
            assert self.state.duty is not None
            assert self.state.duty.role != "rollout" or self.current is None or self.state.version == self.current

    @rule()
    def connects(self) -> None:
        self.feed(Connected())

    @precondition(lambda self: self.state.phase is not Phase.ABSENT)
    @rule()
    def dies(self) -> None:
        self.alive.clear()
        self.feed(Disconnected())

    @rule(duty=st.sampled_from((None, *DUTIES)))
    def is_wanted(self, duty: Duty | None) -> None:
        self.feed(Want(duty))

    @rule()
    def run_ends(self) -> None:
        self.feed(RunEnds())
        assert self.state.wanted is None
        assert self.state.phase in (Phase.STOPPING, Phase.ABSENT)

    @rule(version_behind=st.integers(0, 1))
    def reports_ready(self, version_behind: int) -> None:
        version = None if self.current is None else self.current - version_behind
        self.feed(Reported(self.state.epoch, "ready", version, 4))

    @rule(what=st.sampled_from(("failed", "lost", "stopped")), epochs_ago=st.integers(0, 1))
    def reports_an_end(self, what: str, epochs_ago: int) -> None:
        epoch = self.state.epoch - epochs_ago
        self.alive.pop(epoch, None)
        self.feed(Reported(epoch, what, error="boom"))

    @rule(ok=st.booleans(), behind=st.integers(0, 1))
    def loads(self, ok: bool, behind: int) -> None:
        if self.current is not None:
            self.feed(Loaded(self.state.epoch, self.current - behind, None if ok else "bad checksum"))

    @rule()
    def weights_are_published(self) -> None:
        self.current = 0 if self.current is None else self.current + 1
        self.feed(Published())

    @precondition(lambda self: self.state.phase is Phase.DRAINING)
    @rule()
    def drains(self) -> None:
        self.feed(Drained())

    @rule(seconds=st.sampled_from((0.1, 2.0, 20.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        before = self.state
        self.feed(Tick())
        if before.deadline is not None and self.now >= before.deadline and before.phase is not Phase.ABSENT:
            assert self.state.deadline is None or self.state.deadline > self.now
            assert (self.state.phase, self.state.epoch) != (before.phase, before.epoch)

    @invariant()
    def only_ready_offers(self) -> None:
        if self.state.offers:
            assert self.state.phase is Phase.READY
            assert self.state.duty is not None
            assert self.state.duty.role != "rollout" or self.state.version is not None

    @invariant()
    def every_wait_has_a_deadline(self) -> None:
        state = self.state
        if state.phase in (Phase.DRAINING, Phase.STOPPING):
            assert state.deadline is not None
        if state.phase is Phase.STARTING and not (state.duty and state.duty.role == "rollout" and state.asked is None):
            assert state.deadline is not None
        if state.phase is Phase.FAILED:
            assert (state.deadline is None) == (state.failures > LIMITS.restarts)

    @invariant()
    def absent_and_idle_hold_nothing(self) -> None:
        if self.state.phase in (Phase.ABSENT, Phase.IDLE):
            assert self.state.duty is None
            assert not self.state.up
            assert self.state.version is None

    def teardown(self) -> None:
        """From wherever it stands, a worker that behaves comes to do what it is asked."""
        duty = Duty("rollout", 2)
        self.current = 0 if self.current is None else self.current + 1
        self.feed(Published())
        self.feed(Connected())
        self.feed(RunEnds())
        for _ in range(3):
            self.feed(Reported(self.state.epoch, "stopped"))
        assert self.state.phase is Phase.IDLE
        self.alive.clear()
        self.feed(Want(duty))
        self.feed(Reported(self.state.epoch, "ready", self.current, 4))
        assert self.state.phase is Phase.READY
        assert self.state.offers


TestRoleMachine = RoleMachine.TestCase
TestRoleMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
