"""``libra profile`` on the real torch engine and trainer, in their own processes, over a tiny grid."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from libra.pipeline.cli import main
from libra.pipeline.commands.plan import plan
from libra.pipeline.config import RunConfig, load_config
from libra.pipeline.profile.engine import Ask
from libra.pipeline.profile.measure import Subject, default_grid
from libra.resources.calibration import load_profile
from libra.resources.errors import ConfigError, InfraError
from libra.resources.specs import load_hardware

pytestmark = pytest.mark.torch

COLD = (
    "{hidden_size: 32, intermediate_size: 48, heads: 2, kv_heads: 1, head_dim: 16, batch: 6, drill_steps: 2, "
    "mixed_steps: 1, decay_steps: 2, gate: 1.0e-9, required_copy: 1.0e-9}"
)
OVERRIDES = ("name=tiny", "engine.slots=8", "engine.max_context=160", f"trainer.options.cold_start={COLD}")
GRID = (
    "--batch", "1,4,8", "--context", "10,70", "--prefill", "4,32,80", "--reused", "0,32", "--length", "30,60,90",
    "--rows", "4", "--micro-batch-tokens", "200,1000", "--repeats", "1",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Cold starts of these tests are kept apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIBRA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    target = tmp_path_factory.mktemp("profile") / "mine.yaml"
    arguments = ["profile", "quickstart", *OVERRIDES, "--out", str(target), "--name", "mine", *GRID]
    return target, CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_a_profile_has_costs_provenance_and_held_out_errors(measured: tuple[Path, Result]) -> None:
    target, result = measured
    assert result.exit_code == 0, result.output
    assert "decode tp1 held out" in result.output
    profile = load_profile(target)
    where = profile.provenance
    assert where.status == "measured"
    assert where.source == "torch engine and torch trainer"
    assert where.versions["torch"]
    assert where.grid["batch"] == [1, 4, 8]
    assert where.grid["micro_batch_tokens"] == [200, 1000]
    assert {"decode tp1", "decode tp1 held out", "prefill tp1 held out", "training held out"} <= set(where.residuals)
    assert all(np.isfinite(error) for error in where.residuals.values())
    costs = profile.rollout_costs()
    assert costs is not None
    step = costs.of(1)
    assert step.decode_seconds(8, 8 * 70) > 0
    assert step.prefill_seconds(80) > 0
    assert (step.slots, step.capacity) == (8, 8 * 160)
    factors = profile.training_factors()
    assert factors is not None
    assert not factors.logprob_pass


def test_a_measured_profile_is_what_plans_go_by(measured: tuple[Path, Result], tmp_path: Path) -> None:
    target, _ = measured
    lengths = tmp_path / "lengths"
    lengths.write_text("60\n90\n120\n150\n" * 8)
    options = ["--model", "quickstart", "--cluster", "cpu", "--trainer", "torch", "--lengths", str(lengths), "--json"]
    found = json.loads(CliRunner().invoke(plan, [*options, "--profile", str(target)], catch_exceptions=False).output)
    derived = json.loads(CliRunner().invoke(plan, options, catch_exceptions=False).output)
    assert found["provenance"].startswith("measured (mine: torch engine and torch trainer")
    assert found["train_seconds"] != derived["train_seconds"]
    assert found["rollout_seconds"] != derived["rollout_seconds"]


def test_a_measured_profile_is_what_scenarios_go_by(measured: tuple[Path, Result], tmp_path: Path) -> None:
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(
        "name: tiny\nmodel: quickstart\ncluster: cpu\ntrainer: torch\nsteps: 3\ngroups: 2\nmembers: 2\nuniform_tp: 1\n"
        "activation_seconds: 0\njoin_seconds: 0\nvariants: [static_uniform]\n"
        "workload: {mean_from: 1000, mean_to: 1000, limit: 1200}\n"
    )
    target, _ = measured
    changed = tmp_path / "large.yaml"
    changed.write_text(target.read_text().replace("capacity_tokens: 1280.0", "capacity_tokens: 100000.0"))
    arguments = ["simulate", str(scenario), "--seeds", "1", "--json"]
    derived = CliRunner().invoke(main, arguments, catch_exceptions=False)
    result = CliRunner().invoke(main, [*arguments, "--profile", str(changed)], catch_exceptions=False)
    assert json.loads(result.stdout)[0]["step_seconds"] != json.loads(derived.stdout)[0]["step_seconds"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch", "1,9"), "the grid's batch reaches 9, the engine holds 8 (engine.slots); lower it"),
        (("--context", "100"), "the grid's context reaches 207, the engine holds 160"),
        (("--prefill", "10,150", "--reused", "20"), "the grid's prefill reaches 170, the engine holds 159"),
        (("--tp", "1,2"), "engine.kind 'torch' runs at TP 1"),
    ],
)
def test_a_grid_beyond_the_engine_is_refused(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    command = ["profile", "quickstart", *OVERRIDES, "--out", str(tmp_path / "x.yaml"), *GRID, *arguments]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert says in result.output
    assert not (tmp_path / "x.yaml").exists()


def test_a_trainer_without_a_model_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["profile", "scripted", "--out", str(tmp_path / "x.yaml")])
    assert result.exit_code == 2
    assert "publishes weights without a model's config.json" in result.output


def test_an_existing_profile_is_not_overwritten(measured: tuple[Path, Result]) -> None:
    target, _ = measured
    result = CliRunner().invoke(main, ["profile", "quickstart", "--out", str(target)])
    assert result.exit_code == 2
    assert "exists already" in result.output


def config() -> RunConfig:
    return load_config("quickstart", OVERRIDES)


def test_a_default_grid_fits_its_engine() -> None:
    for slots, context in ((1, 64), (2, 128), (8, 160), (96, 640), (256, 40_960)):
        sizes = [f"engine.slots={slots}", f"engine.max_context={context}", "trainer.micro_batch_tokens=50000"]
        run = load_config("quickstart", sizes)
        default_grid(run).check(run)


def test_a_request_that_the_engine_refuses_ends_the_measurement_with_its_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        subject = Subject(config(), load_hardware("cpu"), tmp_path)
        trainer = await subject.trainer()
        try:
            weights = await trainer.publish(tmp_path / "weights")
            engine = await subject.engine(weights, subject.model(weights, "tiny"))
            try:
                with pytest.raises(InfraError, match="engine holds 160 tokens a sequence"):
                    await engine.burst([Ask("s", engine.tokens(200), 1)])
                with pytest.raises(InfraError, match="ended by length after 1 of 5 tokens"):
                    await engine.burst([Ask("s", engine.tokens(159), 5)])
            finally:
                await engine.stop()
            with pytest.raises(ConfigError, match="quickstart is a known model of 454,400 parameters"):
                subject.model(weights, "quickstart")
        finally:
            await trainer.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch", "0,4"), "0 is below 1"),
        (("--reused", "-1"), "-1 is below 0"),
        (("--length", "9,x"), "give whole numbers with commas between"),
        (("--out", "missing/x.yaml"), "--out missing/x.yaml cannot be written"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(main, ["profile", "quickstart", *OVERRIDES, *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
