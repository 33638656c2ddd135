"""What a bucket policy has learned, kept in a file of the run, so that a resumed run and later ones start with it.

Invariants: the file is whole or it is the one before; what cannot be read or written costs no run its work (the alarm
and a note tell); a claim ends only after its last save has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

from libra.resources.durable import write_file
from libra.resources.errors import ConfigError
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.policy import BucketPolicy

POLICY_FILE = "policy.bin"
"""In the run's folder."""
SAVE_SECONDS = 60.0
"""Between saves while the run goes on; the scheduler's death loses what was learned since."""


def load(policy: BucketPolicy, spec: RunSpec) -> list[str]:
    """Teach ``policy`` what the run's own file holds, if there is one, else what ``policy.learn_from`` names. → notes
    for the user. `ConfigError` for a named file that is missing or damaged."""
    own = _file(spec)
    if own.exists():
        try:
            policy.relearn(own.read_bytes(), 1.0)
        except (OSError, ValueError) as error:
            return [f"what the bucket policy had learned ({own}) is of no use and is left out: {error}"]
        return []
    learn(policy, spec.learn_from, spec.learn_keep)
    return []


def learn(policy: BucketPolicy, files: Iterable[str], keep: float) -> None:
    """Teach ``policy`` what ``policy.learn_from`` names, worth ``keep``. `ConfigError` for a file that is missing,
    damaged, or of no use to this policy."""
    for name in files:
        try:
            policy.relearn(Path(name).read_bytes(), keep)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"policy.learn_from names {name}, which cannot be learned from: {error}; name the policy.bin of a run "
                "with the same policy.kind, or leave it out"
            ) from error


class Keeper:
    """Saves what a run's policy has learned, every `SAVE_SECONDS` and at the end."""

    def __init__(self, policy: BucketPolicy, spec: RunSpec, alarms: Alarms) -> None:
        self._policy, self._file, self._alarms = policy, _file(spec), alarms
        self._due = time.monotonic() + SAVE_SECONDS
        self._saving: asyncio.Task[None] | None = None
        self._ended = False

    def tick(self) -> None:
        """Save if it is time."""
        if time.monotonic() > self._due and self._saving is None and not self._ended:
            self._save()

    def end(self) -> bool:
        """Save for the last time; whether that is done. Call it until it is."""
        if self._saving is None and not self._ended:
            self._ended = True
            self._save()
        return self._ended and self._saving is None

    def _save(self) -> None:
        self._due = time.monotonic() + SAVE_SECONDS
        learned = self._policy.learned()
        if learned is not None:
            self._saving = asyncio.create_task(self._write(learned))

    async def _write(self, learned: bytes) -> None:
        try:
            await asyncio.to_thread(write_file, self._file, learned)
        except OSError as error:
            self._alarms.ring("policy file", error)
        finally:
            self._saving = None


def _file(spec: RunSpec) -> Path:
    return Path(spec.run_dir) / POLICY_FILE
