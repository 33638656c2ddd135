"""Staged KV as the scheduler, the driver and other workers name it, and how it moves."""

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


@dataclass(frozen=True, slots=True)
class Migration:
    """How the KV of a trajectory that moved came to the instance ``target``: the ``way`` (``load`` from an arena of the
    node, ``fetch`` from another node, ``prefill``: computed again), its ``tokens`` and ``bytes``, the ``seconds`` it
    took (0: not measured) and those it was ``expected`` to take (None: nobody said)."""

    way: str
    source: str
    target: str
    tokens: int
    bytes: int
    seconds: float
    expected: float | None
