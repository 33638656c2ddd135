"""The run's state on disk: opened fresh, or brought back from the newest checkpoint and the journal after it.

Invariants: a checkpoint holds the trainer's files and the books of the same version, and names the journal segment that
begins where those books end; so the books of a resumed run are the checkpoint's with every later record applied. The
journal is pruned only below the oldest kept checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from libra.pipeline.config import RunConfig, to_plain
from libra.pipeline.ledger.events import from_record
from libra.pipeline.ledger.ledger import Ledger, Rules
from libra.pipeline.ledger.snapshot import restore, snapshot
from libra.pipeline.run.books import Books
from libra.pipeline.run.waits import Emit
from libra.pipeline.store.checkpoints import CheckpointStore
from libra.pipeline.store.journal import Journal, read_journal
from libra.pipeline.store.run_folder import RunFolder
from libra.pipeline.view.events import Note
from libra.resources.errors import StoreError

MAY_DIFFER = (
    "steps",
    "run_dir",
    "cluster",
    "deadlines",
    "driver",
    "environment.inline",
    "retries",
    "store",
    "staleness.deadline",
    "staleness.on_expiry",
)
"""Config keys that a resumed run may change: they do not decide what is trained on what."""


def rules_of(config: RunConfig) -> Rules:
    """What the books need of the config."""
    return Rules(
        batch_groups=config.batch_groups,
        group_size=config.group_size,
        alpha=config.staleness.alpha,
        steps=config.steps,
        min_usable=config.algorithm.min_usable,
        require_full=config.groups.partial == "require_full",
        max_turns=config.environment.max_turns,
    )


class RunState:
    """The books and the journal of a run folder, whose lock this process holds, until `close`."""

    def __init__(
        self, folder: RunFolder, books: Books, journal: Journal, checkpoints: CheckpointStore,
        newest: tuple[int, Path] | None,
    ) -> None:  # fmt: skip
        self.folder, self.books, self.checkpoints = folder, books, checkpoints
        self._journal, self._newest = journal, newest
        self._segments: dict[int, int] = {}

    @classmethod
    def create(cls, config: RunConfig, folder: RunFolder, emit: Emit) -> Self:
        """The state of a new run in ``folder``, which was just made."""
        journal = Journal(folder.journal, config.store.journal_sync)
        books = Books(Ledger(rules_of(config)), journal, emit)
        return cls(folder, books, journal, CheckpointStore(folder.checkpoints, config.store.keep), None)

    @classmethod
    def resume(cls, config: RunConfig, folder: RunFolder, emit: Emit) -> Self:
        """Bring back the run in ``folder``. `StoreError` says what is missing or damaged."""
        checkpoints = CheckpointStore(folder.checkpoints, config.store.keep)
        latest = checkpoints.latest()
        for message in latest.messages:
            emit(Note(time.time(), message))
        found, rules = latest.checkpoint, rules_of(config)
        state = None if found is None else found.state()
        contents = read_journal(folder.journal, None if state is None else state["segment"])
        if contents.tail:
            emit(Note(time.time(), f"journal: {contents.tail}"))
        if state is None and contents.records:
            raise StoreError(
                f"{folder.path} has a journal of {len(contents.records)} records but no checkpoint to apply them to; "
                "restore a checkpoint, or start anew in another folder"
            )
        ledger = Ledger(rules) if state is None else restore(rules, state["ledger"])
        for record in contents.records:
            ledger.apply(from_record(record))
        if ledger.version > config.steps:
            raise StoreError(
                f"steps = {config.steps}, but the run in {folder.path} has trained {ledger.version} already; "
                "ask for at least as many"
            )
        folder.store_config(to_plain(config))
        for moved in folder.set_aside_batches(ledger.version + (ledger.version in ledger.closed)):
            emit(Note(time.time(), f"the journal does not know of a batch on disk: it is now {moved}"))
        journal = Journal(folder.journal, config.store.journal_sync)
        books = Books(ledger, journal, emit)
        newest = None if found is None else (found.step, found.path)
        opened = cls(folder, books, journal, checkpoints, newest)
        if found is not None and state is not None:
            opened._segments[found.step] = state["segment"]
        return opened

    @property
    def fresh(self) -> bool:
        """Whether there is no checkpoint yet, so the trainer begins with version 0."""
        return self._newest is None

    def newest_checkpoint(self) -> tuple[int, Path] | None:
        """Version and directory of the newest checkpoint; None before the first one."""
        return self._newest

    async def save(self, write: Callable[[Ledger, Path], Awaitable[None]]) -> None:
        """Make a checkpoint of the ledger's version; ``write(ledger, directory)`` adds the trainer's files."""
        ledger = self.books.ledger
        version = ledger.version
        directory = self.checkpoints.begin(version)
        try:
            await write(ledger, directory)
        except BaseException:
            self.checkpoints.abandon(version)
            raise
        ledger.forget_batches(before=version)
        segment = self._journal.rotate()
        state: dict[str, Any] = {"ledger": snapshot(ledger), "segment": segment}
        checkpoint = await asyncio.to_thread(self.checkpoints.commit, version, state)
        self._newest = (checkpoint.step, checkpoint.path)
        self._segments[version] = segment
        kept = self.checkpoints.steps()
        if all(step in self._segments for step in kept):
            self._segments = {step: self._segments[step] for step in kept}
            self._journal.prune(before=min(self._segments.values()))

    def close(self) -> None:
        """Make the journal durable."""
        self._journal.close()
