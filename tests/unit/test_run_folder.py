from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libra.pipeline.store.run_folder import RunFolder, config_differences, fingerprint
from libra.resources.durable import naming
from libra.resources.errors import StoreError

CONFIG: dict[str, Any] = {"seed": 1, "algorithm": {"lr": 1e-3, "clip": [0.2, 0.28]}, "steps": 24, "model": None}


def test_a_full_disk_is_named_where_the_system_names_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}'"),
        naming(tmp_path),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")


def test_a_new_folder_holds_its_config_and_opens_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "a", CONFIG)

    assert folder.read_config() == CONFIG
    assert folder.fingerprint == fingerprint(CONFIG)
    assert len(folder.run) == 8 and int(folder.run, 16) >= 0
    assert folder.journal.is_dir() and folder.checkpoints.is_dir() and folder.logs.is_dir()
    assert folder.batch(12) == tmp_path / "runs" / "a" / "trajectories" / "step-000012.zarr"
    assert RunFolder.open(folder.path) == folder
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_an_empty_folder_is_taken_and_another_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", CONFIG)
    with pytest.raises(StoreError, match=r"holds a run already: resume=True goes on .*--resume"):
        RunFolder.create(tmp_path / "empty", CONFIG)
    with pytest.raises(StoreError, match="is not a run folder and holds empty; give the run a new or empty folder"):
        RunFolder.create(tmp_path, CONFIG)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file is a file"):
        RunFolder.create(tmp_path / "file", CONFIG)


def test_what_is_no_run_folder_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere does not exist"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"is not a run folder \(run.json is missing\)"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(StoreError, match=r"run\.json is damaged"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(StoreError, match="has format 9; this version reads format 1"):
        RunFolder.open(tmp_path)


def test_resume_shows_the_keys_that_differ(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a", CONFIG)
    changed = {**CONFIG, "algorithm": {"lr": 1e-2, "clip": (0.2, 0.28)}, "steps": 48}

    assert RunFolder.resume(tmp_path / "a", dict(reversed(CONFIG.items()))).run
    with pytest.raises(
        StoreError, match=r"algorithm\.lr: 0\.001 in the run, 0\.01 now\n  steps: 24 in the run, 48 now"
    ):
        RunFolder.resume(tmp_path / "a", changed)
    folder = RunFolder.resume(tmp_path / "a", changed, may_differ=("algorithm", "steps"))
    folder.store_config({**CONFIG, "steps": 48})
    assert folder.read_config()["steps"] == 48


def test_differences_name_missing_keys_and_nested_ones() -> None:
    assert config_differences({"a": {"b": 1, "c": {}}, "d": 2}, {"a": {"b": 1, "c": {"e": 3}}, "f": None}) == [
        ("a.c", "{}", "unset"),
        ("a.c.e", "unset", "3"),
        ("d", "2", "unset"),
        ("f", "unset", "None"),
    ]


def test_the_fingerprint_ignores_the_order_of_keys_alone() -> None:
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    (folder.path / "config.yaml").write_text("a: [")
    with pytest.raises(StoreError, match=r"cannot read .*config\.yaml"):
        folder.read_config()
    with pytest.raises(StoreError, match="cannot store plainly"):
        folder.store_config({"a": object()})
    assert (folder.path / "config.yaml").read_text() == "a: ["


def test_batches_that_the_journal_does_not_know_are_set_aside_and_never_removed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a", CONFIG)
    for step in (3, 4, 5):
        folder.batch(step).mkdir()
        (folder.batch(step) / "zarr.json").write_text(f"first {step}")
    assert [path.name for path in folder.set_aside_batches(4)] == [
        "step-000004.zarr.aside",
        "step-000005.zarr.aside",
    ]
    folder.batch(5).mkdir()
    assert [path.name for path in folder.set_aside_batches(4)] == ["step-000005.zarr.aside2"]
    assert sorted(path.name for path in folder.trajectories.iterdir()) == [
        "step-000003.zarr",
        "step-000004.zarr.aside",
        "step-000005.zarr.aside",
        "step-000005.zarr.aside2",
    ]
    assert (folder.trajectories / "step-000005.zarr.aside" / "zarr.json").read_text() == "first 5"
