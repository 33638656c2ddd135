"""For tests on real vLLM: models that it can run on CPUs, and the mark that says when there is none.

An engine takes half a minute and a gigabyte to start, so tests share one where they can (the fixture ``vllm_core``).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from child_parts import CountingEnvironment

from libra.resources.types import Tokens, WeightVersion
from libra.tasks.envs.base import Action

VOCAB = 40
SLOTS = 3
MAX_CONTEXT = 200
PREFILL = 48
"""Tokens prefilled in a step: fewer than many a prompt has, and than those of several requests together."""
INSTALLED = find_spec("vllm") is not None
VLLM = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed: make vllm"),
]
SIZES: dict[str, Any] = {"head_dim": 32, "initializer_range": 0.2}


def vllm_model(seed: int, kv_heads: int = 2) -> Any:
    """A tiny Qwen3 with a head dimension that vLLM knows."""
    from tiny_models import tiny_model

    return tiny_model("qwen3", seed=seed, vocabulary=VOCAB, num_key_value_heads=kv_heads, **SIZES)


def publish_model(directory: Path, version: int, kv_heads: int = 2) -> WeightVersion:
    """Publish the model of seed ``version`` as that version."""
    from tiny_models import publish

    return publish(vllm_model(version, kv_heads), directory, version)


class CoinEnvironment(CountingEnvironment):
    """What an untrained model can play: most ids end a turn, and half of those call the tool. The reward is how often
    it did, so that groups have a spread."""

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(range(60))

    def parse(self, tokens: Tokens, finished: bool) -> Action:
        if not finished:
            return Action("final", end="malformed")
        return Action("call", {"name": "count"}) if tokens[-1] < 30 else Action("final", end="answer")
