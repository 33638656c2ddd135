"""What is dear to start is started once a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_parts import MAX_CONTEXT, PREFILL, SLOTS


@pytest.fixture(scope="session")
def _started_core() -> Iterator[Any]:
    from libra.tasks.engines.base import ALONE, EngineConfig
    from libra.tasks.engines.vllm_core import Core
    from libra.tasks.engines.vllm_options import VllmOptions

    config = EngineConfig(kind="vllm", slots=SLOTS, max_context=MAX_CONTEXT, max_prefill_tokens=PREFILL)
    core = Core(config, VllmOptions(), None, ALONE)
    yield core
    core.close()


@pytest.fixture
def vllm_core(_started_core: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The core of every `VllmEngine` that the test makes (one at a time): real vLLM, its counts at zero, without
    requests. It loads what the engine loads, whatever it had before."""
    from libra.tasks.engines.vllm_core import Meter

    monkeypatch.setattr("libra.tasks.engines.vllm.Core", lambda *_: _started_core)
    _started_core.meter = Meter()
    yield _started_core
    for identifier in list(_started_core._requests):
        _started_core.abort(identifier)
    _started_core.take()
