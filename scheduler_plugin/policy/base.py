"""The seam of bucket policies.

A policy is a pure state machine: it sees what the routing table knows, decides, and learns from finished trajectories.
The plugin and a simulator drive the same object. Invariants: `place` never waits and has no effect but its answer; a
placement names the tag of one of the buckets, and an instance only if that instance is ready and carries that tag;
an answer that breaks this, and any exception, leaves the segment unbound: it runs nowhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from libra.resources.errors import ConfigError
from libra.resources.types import Bucket, RolloutInstance, ToolState
from libra.scheduler_plugin.policy.moves import MoveEstimate, MoveOutcome

_SHIPPED = {
    "context_bounds": "libra.scheduler_plugin.policy.context_bounds:ContextBounds",
    "cmlfq": "libra.scheduler_plugin.cmlfq.policy:CMlfq",
    "least_loaded": "libra.scheduler_plugin.policy.least_loaded:LeastLoaded",
    "mlfq": "libra.scheduler_plugin.policy.mlfq:Mlfq",
    "length_threshold": "libra.scheduler_plugin.policy.length_threshold:LengthThreshold",
    "embedding_like": "libra.scheduler_plugin.policy.embedding_like:EmbeddingLike",
    "oracle": "libra.scheduler_plugin.policy.oracle:Oracle",
}


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One segment that is to run next.

    ``prompt``: the key of the trajectory's prompt, the same for all members of a group and in every epoch. ``context``:
    tokens before the segment. ``history``: the states of the trajectory's tool returns so far, the latest last
    (do not change it). ``current``: address of the instance that holds its KV, None when none does.
    """

    trajectory: str
    prompt: str
    context: int
    history: Sequence[ToolState]
    current: str | None


@dataclass(frozen=True, slots=True)
class Placement:
    """The tag to run under, and the instance's address. None: any instance of the tag; the routing table then takes the
    one with the trajectory's KV, else the least loaded, and waits for one where none is ready. ``move``: how the
    trajectory's KV should come to it, if the policy reckons with that."""

    tag: str
    address: str | None = None
    move: MoveEstimate | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class FinishedTrajectory:
    """What is known of a trajectory that has ended: its prompt, its final context in tokens, the states of its tool
    returns. ``context`` is None if it failed or was given up: then it shows nothing about lengths."""

    trajectory: str
    prompt: str
    context: int | None
    history: Sequence[ToolState]


class BucketPolicy(ABC):
    """Chooses buckets and instances."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """``options``: the policy's config without ``kind``. `ConfigError` names an option that it does not know."""
        self.options = dict(options)

    @abstractmethod
    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        """Where the segment runs. ``instances``: those that are ready, with their load at this instant (do not keep the
        sequence); ``buckets``: ascending by ``max_context``. Raises `ValueError` when no bucket can hold the
        context."""

    def observe(self, finished: FinishedTrajectory) -> None:  # noqa: B027 - a policy need not learn
        """A trajectory has ended."""

    def moved(self, outcome: MoveOutcome) -> None:  # noqa: B027 - a policy need not learn
        """A trajectory has moved: what later moves are expected to take may follow it."""

    def metrics(self) -> dict[str, float]:
        """What it would show of itself: plain numbers by name, the same names as long as it lives."""
        return {}

    def learned(self) -> bytes | None:
        """What it has learned, for `relearn`; None: it keeps nothing."""
        return None

    def relearn(self, data: bytes, keep: float) -> None:
        """Add what `learned` gave, its evidence worth ``keep`` (0 to 1) of what it was. ``ValueError`` if damaged, of
        another kind, or if this policy learns nothing."""
        raise ValueError(f"{type(self).__name__} learns nothing")


def load_policy(config: Mapping[str, Any]) -> BucketPolicy:
    """The policy that ``config`` names: ``kind`` is a shipped one (`_SHIPPED`) or the import path of a `BucketPolicy`
    (``my.module:Policy``); the other keys are its options. Raises `ConfigError`."""
    options = dict(config)
    kind = str(options.pop("kind", "context_bounds"))
    path = _SHIPPED.get(kind, kind)
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name) if name else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy.kind {kind!r} cannot be imported where the scheduler runs: {error}") from None
    if not (isinstance(found, type) and issubclass(found, BucketPolicy)):
        raise ConfigError(
            f"policy.kind {kind!r} is no bucket policy; take one of {', '.join(_SHIPPED)}, "
            "or the import path of a BucketPolicy: 'my.module:Policy'"
        )
    return found(options)
