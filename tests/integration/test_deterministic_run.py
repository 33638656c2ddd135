"""A deterministic run at α = 0, on real Dask processes, equals the loop in one process bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from distributed import Client
from reference_loop import SMALL_RUN, ReferenceLoop
from run_harness import PlayedRun, batches, run_cluster
from safetensors.numpy import load_file

from libra.pipeline.config import load_config, to_plain
from libra.pipeline.store.run_folder import RunFolder
from libra.resources.weights import MODEL_FILE

pytestmark = [pytest.mark.cluster, pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the run's trainer keeps its cold start, for the reference loop to begin with the same."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("LIBRA_CACHE_DIR", str(cache))
    return cache


@pytest.fixture
def client(cache: Path) -> Iterator[Client]:
    with run_cluster() as client:
        yield client


@pytest.mark.parametrize("inline", [False, True], ids=["pairs", "residences"])
def test_five_steps_equal_the_reference_loop(tmp_path: Path, cache: Path, client: Client, inline: bool) -> None:
    form = f"environment.inline={str(inline).lower()}"
    config = load_config("quickstart", [*SMALL_RUN, form, f"run_dir={tmp_path / 'run'}"])
    run = PlayedRun(client, to_plain(config))
    summary = run.fit()

    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "cache").symlink_to(cache)
    loop = ReferenceLoop(config, tmp_path / "reference")
    loop.initialise()
    before = loop.evaluate()
    steps = list(loop.steps())
    after = loop.evaluate()

    assert len(steps) == 5
    for step, (version, batch) in zip(steps, batches(run.folder), strict=True):
        for got, want in zip(batch.trajectories(), step.trajectories, strict=True):
            assert (got.id, got.prompt, got.end, got.reward) == (want.id, want.prompt, want.end, want.reward)
            for field in ("tokens", "mask", "versions", "logprobs"):
                np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=f"{field} {got.id}")
            assert set(got.versions[got.mask == 1]) == {version}

    weights = load_file(RunFolder.open(run.folder).checkpoints / "step-000005" / "model.safetensors")
    expected = load_file(Path(loop.trainer.publish(tmp_path / "weights").path) / MODEL_FILE)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
    for when, played in (("heldout_before", before), ("heldout_after", after)):
        assert summary[when] == pytest.approx(np.mean([t.reward for t in played]))
