"""A vLLM engine in this process with an arena beside it, for tests and benchmarks of KV that moves."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry
from libra.resources.kv.ownership import OwnedArena, arena_path
from libra.resources.types import WeightVersion
from libra.tasks.engines.base import EngineConfig, Generated, GenerateRequest, Place
from libra.tasks.registry import engine_class


class Instance:
    """An engine of TP degree ``tp``, and the arena of ``budget`` bytes that its Dask worker would own."""

    def __init__(
        self,
        run: str,
        name: str,
        tp: int,
        weights: WeightVersion,
        *,
        budget: int = 16 * 2**20,
        slots: int = 4,
        max_context: int = 256,
    ) -> None:
        self.run_name, self.name, self.tp, self.budget = run, name, tp, budget
        self.config = EngineConfig(kind="vllm", slots=slots, max_context=max_context)
        self.owned: OwnedArena | None = None
        self.path = arena_path(run, name)
        self.start(weights)

    def start(self, weights: WeightVersion) -> None:
        place = Place(tp=self.tp, arena=str(self.path))
        self.engine = engine_class("vllm")(self.config, tokenizer_path=None, deterministic=False, place=place)
        self.engine.load(weights)
        assert self.engine.kv_layout is not None
        assert self.engine.kv_layout.tp == self.tp
        if self.owned is None:
            self.owned = OwnedArena(self.run_name, self.name, self.engine.kv_layout, self.budget)
            assert self.owned.path == self.path
            self.arena.set_weight_version(weights.version)

    @property
    def arena(self) -> Arena:
        """The arena, once the engine has loaded."""
        assert self.owned is not None
        assert self.owned.arena is not None
        return self.owned.arena

    def run(self, sequence: str, tokens: NDArray[np.int32], max_new: int = 20, **kv: Any) -> Generated:
        name = f"{sequence}/{time.monotonic()}"
        self.engine.submit(GenerateRequest(name, sequence, tokens, max_new, (), 0.0, 0, **kv))
        ended: list[Generated] = []
        while self.engine.busy:
            ended += self.engine.step()
        (one,) = ended
        assert one.error is None
        return one

    def staged(self, sequence: str, version: int, tokens: NDArray[np.int32]) -> Entry:
        """The entry, once it is published."""
        for _ in range(500):
            found = self.arena.find(sequence, version, tokens, self.engine.kv_layout)
            if isinstance(found, Entry):
                return found
            time.sleep(0.02)
        raise AssertionError(str(found))

    def close(self) -> None:
        self.engine.close()
        if self.owned is not None:
            self.owned.release()
