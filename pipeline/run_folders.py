"""What a command does about a run folder that is already there.

Invariant: nothing is ever deleted; a folder that is in use by a living process is never moved.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

from libra.pipeline.store.journal import read_journal
from libra.pipeline.store.lock import RunLock
from libra.pipeline.store.run_folder import IDENTITY_FILE, RunFolder
from libra.pipeline.view.files import read_metrics, read_summary
from libra.resources.durable import TEMPORARY
from libra.resources.errors import StoreError


def make_way(path: Path, *, resume: bool, fresh: bool) -> Path | None:
    """Make the run folder ``path`` free for a new run, or ready to be resumed.

    A run that has finished, or that never began, is moved aside to ``<path>.1``, ``.2`` …; another one only if
    ``fresh`` says so. Returns where it went, or None if nothing was moved. `StoreError` says what to do otherwise.
    """
    if not path.exists():
        if resume:
            raise StoreError(f"there is no run to resume in {path}: leave --resume out to start one")
        return None
    if resume:
        RunFolder.open(path)
        RunLock.check_free(path)
        return None
    if path.is_dir() and not any(path.iterdir()):
        return None
    RunFolder.open(path)  # anything else there is not ours to move
    RunLock.check_free(path)
    if not fresh and not finished(path) and has_begun(path):
        raise StoreError(
            f"{path} holds an unfinished run ({progress(path)}): --resume goes on with it, --fresh moves it aside and "
            "starts anew, name=<another> gives the new run another folder"
        )
    return _set_aside(path)


def finished(path: Path) -> bool:
    """Whether the run in ``path`` has come to its last step."""
    return read_summary(path).get("outcome") == "finished"


def has_begun(path: Path) -> bool:
    """Whether a run in ``path`` has anything to lose: a step, an evaluation, a checkpoint, a journaled event."""
    if not (path / IDENTITY_FILE).is_file():
        return False
    metrics, folder = read_metrics(path), RunFolder.open(path)
    if metrics.steps or metrics.evaluations or metrics.damaged:
        return True
    kept = [*folder.trajectories.glob("*"), *folder.checkpoints.glob("*")]
    if any(TEMPORARY not in entry.name for entry in kept):
        return True
    try:
        return bool(read_journal(folder.journal).records)
    except StoreError:
        return True  # damaged: it held something


def progress(path: Path) -> str:
    """``step 12 done``, as far as the metrics tell."""
    steps = read_metrics(path).steps
    return f"step {steps[-1]['step']} done" if steps else "no step done yet"


def _set_aside(path: Path) -> Path:
    with RunLock.acquire(path, "moving it aside"):
        target = next(candidate for n in count(1) if not (candidate := path.with_name(f"{path.name}.{n}")).exists())
        path.rename(target)
    return target
