from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.resources.errors import WeightError
from libra.resources.weights import (
    OWNER_FILE,
    check_weights,
    checked_tensors,
    load_weights,
    prune_weights,
    publish_weights,
    published_versions,
    reap_weight_directories,
    release_weight_directory,
    weight_directory,
)

TENSORS: dict[str, Any] = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.norm.weight": np.ones(4, np.float16),
    "steps": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float64),
}
EXTRA = {"config.json": b'{"model_type": "qwen3"}'}


def test_published_weights_are_loaded_as_they_were(tmp_path: Path) -> None:
    weights = publish_weights(tmp_path, 3, TENSORS, EXTRA)

    assert Path(weights.path) == tmp_path / "v000003"
    assert (tmp_path / "v000003" / "config.json").read_bytes() == EXTRA["config.json"]
    loaded = load_weights(weights)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        np.testing.assert_array_equal(loaded[name], tensor)


def test_a_transposed_tensor_keeps_its_values(tmp_path: Path) -> None:
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3).T
    np.testing.assert_array_equal(load_weights(publish_weights(tmp_path, 0, {"w": tensor}, {}))["w"], tensor)


def test_publishing_again_is_the_same_version_and_other_content_an_error(tmp_path: Path) -> None:
    weights = publish_weights(tmp_path, 3, TENSORS, EXTRA)
    before = (tmp_path / "v000003" / "model.safetensors").stat()

    assert publish_weights(tmp_path, 3, TENSORS, EXTRA) == weights
    assert (tmp_path / "v000003" / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(WeightError, match=r"version 3 .*'model\.norm\.weight' is .* next version"):
        publish_weights(tmp_path, 3, {**TENSORS, "model.norm.weight": np.zeros(4, np.float16)}, EXTRA)
    with pytest.raises(WeightError, match=r"'config\.json' is"):
        publish_weights(tmp_path, 3, TENSORS, {"config.json": b"{}"})


def test_equal_weights_have_equal_digests_whatever_the_version(tmp_path: Path) -> None:
    first, second = (publish_weights(tmp_path, version, TENSORS, EXTRA) for version in (1, 2))
    other = publish_weights(tmp_path, 3, {**TENSORS, "steps": np.array(8, np.int64)}, EXTRA)
    assert first.digest == second.digest != other.digest


def test_a_flipped_bit_names_the_tensor(tmp_path: Path) -> None:
    weights = publish_weights(tmp_path, 0, {"w": np.ones(4, np.float32)}, {})
    path = Path(weights.path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightError, match=r"tensor 'w' .* damaged: published as .*, read as .*publish"):
        load_weights(weights)


def test_tensors_one_by_one_are_checked_before_they_are_given_out(tmp_path: Path) -> None:
    tensors = {"a": np.ones(4, np.float32), "b": np.full(4, 2, np.float32)}
    weights = publish_weights(tmp_path, 0, tensors, {})
    assert {name: tensor.tolist() for name, tensor in checked_tensors(weights)} == {"a": [1] * 4, "b": [2] * 4}
    assert check_weights(weights) == {"a": ("float32", (4,)), "b": ("float32", (4,))}
    path = Path(weights.path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    given = []
    with pytest.raises(WeightError, match="tensor 'b'"):
        given.extend(name for name, _ in checked_tensors(weights))
    with pytest.raises(WeightError, match="tensor 'b'"):
        check_weights(weights)


def test_missing_cut_and_foreign_weights_are_named(tmp_path: Path) -> None:
    weights = publish_weights(tmp_path, 5, TENSORS, EXTRA)
    with pytest.raises(WeightError, match=r"no published weights at .*v000009"):
        load_weights(replace(weights, path=str(tmp_path / "v000009")))
    with pytest.raises(WeightError, match="have version 5, but version 6"):
        load_weights(replace(weights, version=6))
    with pytest.raises(WeightError, match=r"have digest .* 'ab' was asked for"):
        load_weights(replace(weights, digest="ab"))
    path = Path(weights.path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(WeightError, match=r"cannot read .*model\.safetensors"):
        load_weights(weights)


def test_checksums_rewritten_to_fit_other_tensors_do_not_fit_the_digest(tmp_path: Path) -> None:
    weights = publish_weights(tmp_path, 0, {"w": np.ones(4, np.float32)}, {})
    other = publish_weights(tmp_path, 1, {"w": np.zeros(4, np.float32)}, {})
    checksums = json.loads((Path(other.path) / "checksums.json").read_text())
    (Path(weights.path) / "model.safetensors").write_bytes((Path(other.path) / "model.safetensors").read_bytes())
    (Path(weights.path) / "checksums.json").write_text(
        json.dumps({**checksums, "version": 0, "digest": weights.digest})
    )
    with pytest.raises(WeightError, match="have digest"):
        load_weights(weights)


def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="tensor 'w' has type complex64"):
        publish_weights(tmp_path, 0, {"w": np.zeros(2, np.complex64)}, {})
    with pytest.raises(WeightError, match=r"extra file 'checksums\.json'"):
        publish_weights(tmp_path, 0, TENSORS, {"checksums.json": b""})
    assert published_versions(tmp_path) == []


def test_what_a_dead_publisher_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=60)
    dead, living = tmp_path / f"v000001.tmp-{ended.pid}-aa", tmp_path / f"v000002.tmp-{os.getppid()}-bb"
    for leftover in (dead, living):
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half")
    publish_weights(tmp_path, 1, TENSORS, EXTRA)
    assert not dead.exists()
    assert living.exists()
    assert published_versions(tmp_path) == [1]


def test_pruning_keeps_the_newest_and_those_in_use(tmp_path: Path) -> None:
    for version in range(6):
        publish_weights(tmp_path, version, {"w": np.full(2, version, np.float32)}, {})
    assert prune_weights(tmp_path, keep=2, also={1}) == [0, 2, 3]
    assert published_versions(tmp_path) == [1, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000004", "v000005"]


def test_a_weight_directory_is_private_owned_and_removed_with_its_run(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    directory = weight_directory(tmp_path, "0123abcd", shared=shared)

    assert directory == shared / "libra-0123abcd-weights"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert weight_directory(tmp_path, "0123abcd", shared=shared) == directory
    publish_weights(directory, 0, TENSORS, EXTRA)
    assert reap_weight_directories(shared) == [], "its owner is this living process"
    release_weight_directory(directory)
    assert list(shared.iterdir()) == []


def test_a_weight_directory_falls_back_to_the_run_folder(tmp_path: Path) -> None:
    directory = weight_directory(tmp_path / "run", "0123abcd", needed=1 << 62, shared=tmp_path)
    assert directory == tmp_path / "run" / "weights"
    release_weight_directory(directory)
    assert not directory.exists()


OWN = """
import sys
from pathlib import Path
from libra.resources.weights import weight_directory
directory = weight_directory(Path(sys.argv[1]), "feedbeef", shared=Path(sys.argv[1]))
(directory / "v000000").mkdir()
sys.stdout.write("owned\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_the_directory_of_a_killed_owner_is_reaped_and_that_of_a_living_one_refused(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "owned\n"
        assert reap_weight_directories(tmp_path) == []
        with pytest.raises(WeightError, match=f"in use by process {owner.pid} on .*weights of run feedbeef"):
            weight_directory(tmp_path, "feedbeef", shared=tmp_path)
    finally:
        owner.kill()
        owner.communicate(timeout=60)
    assert reap_weight_directories(tmp_path) == [tmp_path / "libra-feedbeef-weights"]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_another_reaper_removes_first_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, left = tmp_path / "libra-0badcafe-weights", tmp_path / "libra-feedbeef-weights"
    left.mkdir()
    (left / OWNER_FILE).touch()
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone, left]))
    assert reap_weight_directories(tmp_path) == [left]


def test_a_file_in_the_directory_s_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "libra-0badcafe-weights").touch()
    with pytest.raises(WeightError, match="libra-0badcafe-weights belongs to another user or is no directory"):
        weight_directory(tmp_path, "0badcafe", shared=tmp_path)
