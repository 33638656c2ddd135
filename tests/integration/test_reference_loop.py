"""The reference loop: repeats bit for bit, and contexts only ever extend, also with a tokenizer that loses text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference_loop import SMALL_RUN, ReferenceLoop, Step

from libra.pipeline.config import RunConfig, load_config
from libra.resources.types import Tokens
from libra.tasks.engines.base import GenerateRequest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


def small_run(*overrides: str) -> RunConfig:
    return load_config("quickstart", [*SMALL_RUN, *overrides])


def train(config: RunConfig, folder: Path, name: str) -> tuple[list[Step], Tokens]:
    """All steps, and the final weights' digest."""
    (folder / name).mkdir()
    (folder / name / "cache").symlink_to(folder / "cache")
    (folder / "cache").mkdir(exist_ok=True)
    loop = ReferenceLoop(config, folder / name)
    loop.initialise()
    return list(loop.steps()), loop.trainer.publish(folder / name / "weights").digest


def assert_same(one: Step, other: Step) -> None:
    for a, b in zip(one.trajectories, other.trajectories, strict=True):
        assert (a.id, a.end, a.reward) == (b.id, b.end, b.reward)
        for field in ("tokens", "mask", "versions", "logprobs"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
    assert len(one.skipped) == len(other.skipped)


def test_a_deterministic_run_repeats_bit_for_bit_whatever_the_slots(folder: Path) -> None:
    first, weights = train(small_run(), folder, "first")
    again, weights_again = train(small_run("engine.slots=3"), folder, "again")
    for one, other in zip(first, again, strict=True):
        assert_same(one, other)
        assert {int(t.versions.max()) for t in one.trajectories} == {one.trained}
    assert weights == weights_again
    assert any(t.reward for t in first[-1].trajectories)


def test_batched_sampling_gives_the_same_batch_up_to_rounding(folder: Path) -> None:
    one, _ = train(small_run("steps=1"), folder, "alone")
    batched, _ = train(small_run("steps=1", "deterministic=false"), folder, "batched")
    for a, b in zip(one[0].trajectories, batched[0].trajectories, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", ["hop", "lossy_hop:LossyHop"])
def test_every_prompt_extends_the_last_context_exactly(folder: Path, kind: str) -> None:
    """Also where decoding and encoding again would not give the ids back: ids are never made from a turn's text."""
    name = kind.split(":")[0]
    overrides = [f"environment.kind={kind}", "engine.kind=scripted", "engine.options={script: 'lossy_hop:garbled'}"]
    config = load_config("scripted", [*overrides, "batch_groups=8"])
    loop = ReferenceLoop(config, folder / name)
    loop.initialise()
    seen: dict[str, Tokens] = {}
    submit = loop.engine.submit

    def watch(request: GenerateRequest) -> None:
        before = seen.get(request.sequence, request.tokens[:0])
        np.testing.assert_array_equal(request.tokens[: len(before)], before)
        assert len(request.tokens) > len(before)
        seen[request.sequence] = request.tokens
        submit(request)

    loop.engine.submit = watch  # type: ignore[method-assign]
    batch = loop.sample_batch().trajectories
    changed = 0
    for t in batch:
        np.testing.assert_array_equal(t.tokens[: len(seen[str(t.id)])], seen[str(t.id)])
        ids = t.tokens[t.mask == 1]
        again = loop.environment.encode(loop.environment.render(ids))  # type: ignore[attr-defined]
        changed += not np.array_equal(again, ids)
    assert max(len(t.tools) for t in batch) > 2
    assert changed > len(batch) // 2
