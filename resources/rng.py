"""Counter-based randomness: a draw depends on its name, never on what was drawn before it.

Invariant: the uniform for (seed, trajectory, position) is the same whatever runs beside it, in whatever order, on
whatever machine; that is what makes a run replayable and a deterministic run equal to its reference loop.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream(seed: int, *names: str | int) -> int:
    """A 64-bit stream number for a named use of ``seed``."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 random bits, one for each (stream, position); shapes broadcast.

    The generator is SplitMix64 (Steele, Lea, Flood 2014) used as a counter hash: mix(stream + (position+1)·γ).
    """
    with np.errstate(over="ignore"):
        z = streams.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(seed: int, *names: str | int) -> random.Random:
    """A ``random.Random`` for a named use of ``seed`` (tasks, busy replies)."""
    return random.Random(stream(seed, *names))
