"""The engine side of `libra profile` on real vLLM: decode steps and prefills of an instance, measured and fitted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from vllm_parts import MAX_CONTEXT, SLOTS, VLLM, VOCAB, publish_model

from libra.pipeline.config import load_config
from libra.pipeline.profile.engine import MeasuredEngine
from libra.pipeline.profile.measure import default_grid, measure_engine
from libra.resources.calibration import fit_rollout

pytestmark = VLLM


@pytest.mark.parametrize("tp", [1, 2])
def test_steps_of_an_instance_are_measured_and_fitted(tp: int, tmp_path: Path) -> None:
    config = load_config("vllm_cpu", [f"engine.slots={SLOTS}", f"engine.max_context={MAX_CONTEXT}"])
    grid = default_grid(config, batch=(1, 2, 3), context=(10, 60), prefill=(4, 32, 100), reused=(0, 16))
    grid = grid.model_copy(update={"repeats": 1})

    async def measured() -> tuple[int, float]:
        weights = publish_model(tmp_path, 0)
        engine = await MeasuredEngine.start(
            config.engine, None, weights, VOCAB, tmp_path / "engine.log", tp=tp, clock="wall"
        )
        try:
            decode, prefill = await measure_engine(engine, grid, tp, lambda text: None)
        finally:
            await engine.stop()
        (step,), _ = fit_rollout(decode, prefill, {tp: float(SLOTS * MAX_CONTEXT)}, SLOTS)
        return step.tp, step.decode_seconds(3, 3 * 60)

    found, seconds = asyncio.run(measured())
    assert found == tp
    assert seconds > 0
