"""Staged KV as the scheduler, the driver and other workers name it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVHandle:
    """The staged KV of a trajectory: ``tokens`` tokens computed under weights ``version``, ``nbytes`` bytes in the
    arena at ``arena`` (a path on ``node``), served to other nodes by the Dask worker at ``worker``.

    A hint, not a promise: the arena may have evicted it, and whoever loads it checks the tokens."""

    trajectory: str
    version: int
    tokens: int
    nbytes: int
    arena: str
    worker: str
    node: str
