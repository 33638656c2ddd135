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
class KVRoom:
    """What an engine's KV cache holds: ``tokens`` over all sequences, of ``bytes_per_token`` bytes over all its ranks
    (0: the engine cannot say)."""

    tokens: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Migration:
    """How the KV of a trajectory that moved came to the instance ``target``: the ``way`` (``load`` from an arena of the
    node, ``fetch`` from another node, ``prefill``: computed again), its ``tokens`` and ``bytes``, the ``seconds`` it
    took (0: not measured). ``fetching`` and ``prefilling``: the seconds that
    bringing it and computing it were each thought to take as one of them was chosen (None: nobody could say)."""

    way: str
    source: str
    target: str
    tokens: int
    bytes: int
    seconds: float
    fetching: float | None = None
    prefilling: float | None = None

    @property
    def expected(self) -> float | None:
        """The estimate of the way that was taken."""
        return self.prefilling if self.way == "prefill" else self.fetching

    def __str__(self) -> str:
        estimates = f"bringing it {_seconds(self.fetching)}, computing it {_seconds(self.prefilling)}"
        return (
            f"{self.way} of {self.tokens} tokens ({self.bytes} B) from {self.source} to {self.target} took "
            f"{self.seconds:.4f} s; estimates: {estimates}"
        )


def _seconds(estimate: float | None) -> str:
    return "unknown" if estimate is None else f"{estimate:.4f} s"
