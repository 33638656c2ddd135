from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from libra.pipeline.store.checkpoints import Checkpoint, CheckpointStore
from libra.resources.errors import StoreError


def commit(store: CheckpointStore, step: int, optimizer: bytes = b"moments") -> Checkpoint:
    directory = store.begin(step)
    (directory / "optimizer.bin").write_bytes(optimizer)
    (directory / "model").mkdir()
    (directory / "model" / "model.safetensors").write_bytes(b"weights" * step)
    return store.commit(step, {"cursor": step, "credits": np.arange(step)})


def test_the_newest_is_found_with_its_files_and_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest().checkpoint is None
    commit(store, 1)
    assert commit(store, 2) == Checkpoint(2, tmp_path / "checkpoints" / "step-000002")

    latest = CheckpointStore(tmp_path / "checkpoints", keep=2).latest()
    assert latest.messages == ()
    assert latest.checkpoint is not None and latest.checkpoint.step == 2
    assert latest.checkpoint.state()["cursor"] == 2
    assert (latest.checkpoint.path / "model" / "model.safetensors").read_bytes() == b"weights" * 2


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 5, 3, 12):
        commit(store, step)
    assert store.steps() == [5, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005", "step-000012"]
    with pytest.raises(StoreError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)


def test_a_half_written_one_is_removed_with_a_message(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    commit(store, 1)
    (store.begin(2) / "optimizer.bin").write_bytes(b"mom")

    latest = CheckpointStore(tmp_path, keep=2).latest()
    assert latest.checkpoint is not None and latest.checkpoint.step == 1
    assert len(latest.messages) == 1 and "step-000002.tmp-" in latest.messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: (path / "optimizer.bin").write_bytes(b"Moments"), "optimizer.bin has CRC-32C .*, written as"),
        (lambda path: (path / "optimizer.bin").write_bytes(b"mo"), "optimizer.bin has 2 bytes, written were 7"),
        (lambda path: (path / "model" / "model.safetensors").unlink(), "model/model.safetensors is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (
            lambda path: (path / "manifest.json").write_text(
                (path / "manifest.json").read_text().replace('"bytes": 7', '"bytes": 2')
            ),
            "manifest.json does not match",
        ),
    ],
)
def test_a_damaged_one_is_set_aside_and_the_one_before_used(
    tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    commit(store, 1)
    harm(commit(store, 2).path)

    latest = store.latest()
    assert latest.checkpoint is not None and latest.checkpoint.step == 1
    [told] = latest.messages
    assert re.search(message, told), told
    assert (tmp_path / "step-000002.damaged").is_dir()
    commit(store, 2)
    assert store.latest().checkpoint == Checkpoint(2, tmp_path / "step-000002")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_step_may_be_written_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    commit(store, 2, b"old")
    commit(store, 2, b"new")
    latest = store.latest().checkpoint
    assert latest is not None and (latest.path / "optimizer.bin").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_crash_between_the_renames_of_a_replacement_brings_the_old_one_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    commit(store, 2).path.rename(tmp_path / "step-000002.replaced")
    assert store.latest().checkpoint == Checkpoint(2, tmp_path / "step-000002")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_commit_needs_a_beginning_and_abandon_ends_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(StoreError, match="no checkpoint of step 3 has been begun"):
        store.commit(3, {})
    directory = store.begin(3)
    store.abandon(3)
    assert not directory.exists()
    with pytest.raises(StoreError, match="call begin"):
        store.commit(3, {})


def test_beginning_again_discards_what_was_begun(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    first = store.begin(3)
    second = store.begin(3)
    assert second.is_dir() and not first.exists()
    assert store.commit(3, None).state() is None
