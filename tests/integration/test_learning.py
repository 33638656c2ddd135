"""The quick start's recipe learns, with its real cold start, engine and trainer at a lag of one batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference_loop import ReferenceLoop

from libra.pipeline.config import load_config

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def test_grpo_learns_from_the_cold_start(tmp_path: Path) -> None:
    """The mean reward of the last 5 of 15 steps exceeds the held-out start by more than 0.2."""
    loop = ReferenceLoop(load_config("quickstart", ["seed=1", "steps=15"]), tmp_path)
    started = loop.initialise()
    assert started["copy_p"] >= 0.95
    before = float(np.mean([t.reward for t in loop.evaluate()]))
    assert before < 0.45
    steps = list(loop.steps(alpha=1))
    assert [step.trained - step.sampled for step in steps] == [0] + [1] * 14
    assert np.mean([step.reward for step in steps[-5:]]) > before + 0.2
