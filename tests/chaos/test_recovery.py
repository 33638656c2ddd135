"""A trainer or an engine dies at the worst instants: the run goes on by itself, and its weights are the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from run_harness import PlayedRun, merged, run_cluster, run_config, trained

from libra.pipeline.store.run_folder import RunFolder
from libra.pipeline.view.events import StepTrained

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(120)]

STEPS = 8


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with run_cluster() as client:
        yield client


def fragile(folder: Path, engine_dies: list[str], trainer_dies: list[str]) -> dict[str, Any]:
    """A run whose batches depend on nothing but the config (α = 0), with parts that die where they are told to."""
    graves = folder.with_name("graves")
    graves.mkdir()
    config = run_config(folder, steps=STEPS, staleness={"alpha": 0}, store={"checkpoint_every": 3})
    ways = {"graves": str(graves), "step_seconds": 0}
    engine = {"kind": "run_parts:FragileEngine", "options": {"deaths": engine_dies, **ways}}
    trainer = {"kind": "run_parts:FragileTrainer", "options": {"deaths": trainer_dies, "graves": str(graves)}}
    return merged(config, {"engine": engine, "trainer": trainer, "retries": {"infra": 5}})


def losses(run: PlayedRun) -> list[float]:
    return [event.measures["loss"] for event in run.recorder.of(StepTrained) if not event.replayed]


def final_weights(run: PlayedRun) -> bytes:
    return (RunFolder.open(run.folder).checkpoints / f"step-{STEPS:06d}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(client: Client, tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    run = PlayedRun(client, fragile(tmp_path_factory.mktemp("undisturbed") / "run", [], []))
    run.fit()
    return run


# A role that fails again waits longer each time, and more than five times in a minute it is given up: three will do.
@pytest.mark.parametrize(
    ("engine_dies", "trainer_dies"),
    [
        ([], ["initialise", "save 0", "publish 0"]),
        (["step 1", "load 3"], ["train 1", "trained 2", "restore"]),
        (["step 4", "load 8"], ["publish 4", "save 6", "trained 8"]),
    ],
    ids=["as it begins", "meanwhile", "at the end"],
)
def test_deaths_change_no_bit_of_the_weights(
    tmp_path: Path, client: Client, undisturbed: PlayedRun, engine_dies: list[str], trainer_dies: list[str]
) -> None:
    run = PlayedRun(client, fragile(tmp_path / "run", engine_dies, trainer_dies))
    run.fit()
    died = {grave.name.replace("-", " ") for grave in (tmp_path / "graves").iterdir()}
    assert died == {*engine_dies, *trainer_dies}
    assert losses(run) == losses(undisturbed)
    assert final_weights(run) == final_weights(undisturbed)
    assert trained(run.folder) == trained(undisturbed.folder)
