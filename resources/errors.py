"""The errors of the whole system.

Invariants: every message names the thing, the values involved and what to do; a ``LibraError`` reaches a user as one
message without a traceback. A failed rollout is data (`InfraError`, `TaskError`) and never ends the run by itself.
"""

from __future__ import annotations


class LibraError(Exception):
    """Base of every error that a user may see; the message says what to do."""


class ConfigError(LibraError):
    """A config is wrong: the message names the key, the value and what would do."""


class BrokenEnvironmentError(LibraError):
    """An environment raised, or returned what no environment may, where no trajectory could be blamed."""


class ClusterError(LibraError):
    """The cluster cannot run this: no plugin, no workers of a role, a claim held by another run, a lost scheduler."""


class StoreError(LibraError):
    """A run folder, journal, checkpoint or trajectory file is missing, locked or damaged."""


class WeightError(LibraError):
    """Published weights are missing, or their checksums or versions do not match."""


class KVError(LibraError):
    """A KV arena or layout is impossible, missing, damaged or in use. KV that is merely not there is no error."""


class DeadlineError(LibraError):
    """A wait ran out. Names what was waited for and who should have unblocked it."""

    def __init__(self, waits_for: str, unblocked_by: str, seconds: float, hint: str = "") -> None:
        self.waits_for, self.unblocked_by, self.seconds, self.hint = waits_for, unblocked_by, seconds, hint
        text = f"waited {seconds:g} s for {waits_for}; unblocked by {unblocked_by}"
        super().__init__(f"{text}. {hint}" if hint else text)

    def __reduce__(self) -> tuple[type[DeadlineError], tuple[str, str, float, str]]:
        return DeadlineError, (self.waits_for, self.unblocked_by, self.seconds, self.hint)


class InfraError(LibraError):
    """The infrastructure failed a trajectory (engine, worker, tool host): retried elsewhere, never a reward."""


class SessionLostError(InfraError):
    """A trajectory's session is gone and cannot be rebuilt: the trajectory restarts from its prompt."""


class ResidenceLostError(InfraError):
    """A residence's worker is gone: the trajectory goes on from its last journaled segment, on another one."""


class TaskError(LibraError):
    """The task itself failed (a broken environment or reward): the trajectory is dropped and counted."""
