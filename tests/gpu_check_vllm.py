"""KV that one real vLLM engine staged, loaded by another one in a fresh process, against the first going on by itself.

A process of its own for `gpu_check`, so that nothing of an engine stays behind; it runs with vLLM for CPUs as well.
Prints one line. Usage: ``python -m gpu_check_vllm FOLDER``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm_parts import VOCAB, publish_model

from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry
from libra.resources.kv.segment import format_segment
from libra.resources.types import WeightVersion
from libra.tasks.engines.base import EngineConfig, Generated, GenerateRequest, Place
from libra.tasks.registry import engine_class

LENGTHS = (45, 150)
"""None a multiple of the block size."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Most that a logprob may differ by: the two engines prefill in other pieces, and round otherwise."""


def started(arena: Path, weights: WeightVersion, dtype: str) -> Any:
    config = EngineConfig(kind="vllm", slots=4, max_context=256, options={"dtype": dtype, "gpu_memory": 0.3})
    engine = engine_class("vllm")(config, tokenizer_path=None, deterministic=False, place=Place(arena=str(arena)))
    engine.load(weights)
    return engine


def generate(engine: Any, sequence: str, tokens: NDArray[np.int32], max_new: int, stage: bool) -> Generated:
    engine.submit(GenerateRequest(f"{sequence}/{stage}", sequence, tokens, max_new, (), 0.0, 0, stage=stage))
    ended: list[Generated] = []
    while engine.busy:
        ended += engine.step()
    (one,) = ended
    assert one.error is None, one.error
    return one


def wait_until_staged(arena: Arena, sequence: str, tokens: NDArray[np.int32], layout: Any) -> None:
    for _ in range(500):
        found = arena.find(sequence, 0, tokens, layout)
        if isinstance(found, Entry):
            return
        time.sleep(0.02)
    raise AssertionError(f"{sequence} was not staged within 10 s: {found}")


def compare(stayed: Generated, moved: Generated, tolerance: float) -> float:
    """The largest difference of logprobs up to the first token that differs, where two tokens may be a tie."""
    differs = np.flatnonzero(stayed.tokens != moved.tokens)
    end = int(differs[0]) + 1 if len(differs) else len(stayed.tokens)
    largest = float(np.abs(stayed.logprobs[:end] - moved.logprobs[:end]).max())
    assert largest <= tolerance, f"logprobs differ by {largest} within {end} tokens; at most {tolerance} is rounding"
    return largest


def main(arguments: list[str]) -> int:
    from vllm.platforms import current_platform

    folder = Path(arguments[0])
    dtype = "float32" if current_platform.is_cpu() else "bfloat16"
    weights, path = publish_model(folder / "weights", 0), folder / "arena"
    rng = np.random.default_rng(0)
    ids = lambda length: rng.integers(0, VOCAB, length).astype(np.int32)  # noqa: E731
    contexts, stayed, staged = {}, {}, {}

    first = started(path, weights, dtype)
    format_segment(path, first.kv_layout, 64 << 20, slots=8)
    with Arena(path, writable=True) as arena:
        for length in LENGTHS:
            name, prompt = f"check{length}", ids(length)
            turn = generate(first, name, prompt, 20, stage=True)
            contexts[name] = np.concatenate([prompt, turn.tokens, ids(7)])
            wait_until_staged(arena, name, contexts[name], first.kv_layout)
            stayed[name], staged[name] = generate(first, name, contexts[name], 30, stage=False), turn.staged
        first.close()

        second = started(path, weights, dtype)
        differences, loaded = [], 0
        for name, context in contexts.items():
            moved = generate(second, name, context, 30, stage=False)
            assert moved.loaded >= 0.95 * staged[name], f"{moved.loaded} tokens loaded of {staged[name]} staged"
            differences.append(compare(stayed[name], moved, TOLERANCE[dtype]))
            loaded += moved.loaded
        second.close()
    sys.stdout.write(f"{dtype}: {loaded} tokens loaded; logprobs differ by at most {max(differences):.1e}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
