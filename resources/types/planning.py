"""What a plan says: which devices train, which roll out, how, and what it should cost.

Invariants: no device is named twice in a plan; layouts list instances bucket by bucket, in ascending order of the
contexts that buckets serve; times are predicted seconds of one iteration.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Recompute = Literal["none", "selective", "full"]
"""Activations kept in the forward pass: all, all but attention's inner ones, or only each layer's input."""


@dataclass(frozen=True, slots=True, order=True)
class TrainStrategy:
    """How ``gpus`` devices train: tensor, expert, pipeline and data parallel degrees (their product is ``gpus``),
    sequences of one micro-batch, and the recompute policy. Attention is replicated over ``ep``·``dp``."""

    tp: int
    ep: int
    pp: int
    dp: int
    micro_batch: int = 1
    recompute: Recompute = "full"

    @property
    def gpus(self) -> int:
        """Devices used."""
        return self.tp * self.ep * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks that take different sequences."""
        return self.ep * self.dp

    def __str__(self) -> str:
        degrees = [f"TP{self.tp}", f"EP{self.ep}", f"PP{self.pp}", f"DP{self.dp}"]
        shown = [d for d in degrees if not d.endswith("P1") or d.startswith("DP")]
        return f"{'·'.join(shown)} (micro-batch {self.micro_batch}, {self.recompute} recompute)"


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One rollout instance: its TP degree, the contexts (tokens) and number of requests priced on it, and its predicted
    seconds. In a mixed bucket, ``first_context`` and ``last_context`` are those of whatever was assigned to it."""

    tp: int
    first_context: int
    last_context: int
    requests: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Instances that serve contexts up to ``max_context`` (None: no bound). ``tp`` is None in a mixed bucket, which is
    routed least-loaded over instances of any TP degree."""

    tp: int | None
    max_context: int | None
    instances: int


LayoutKind = Literal["partition", "mixing", "homogeneous"]


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """``kind``: contiguous intervals by context, one unbounded mixed bucket, or the best homogeneous layout."""

    kind: LayoutKind
    seconds: float
    instances: tuple[InstancePlan, ...]
    buckets: tuple[BucketPlan, ...]

    @property
    def gpus(self) -> int:
        """Devices used."""
        return sum(instance.tp for instance in self.instances)

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degree of each instance."""
        return tuple(instance.tp for instance in self.instances)

    def counts(self) -> dict[int, int]:
        """Instances of each TP degree, ascending."""
        return {tp: self.degrees.count(tp) for tp in sorted(set(self.degrees))}

    def __str__(self) -> str:
        return " + ".join(f"{n}×TP{tp}" for tp, n in self.counts().items()) or "nothing"


PlannedRole = Literal["train", "rollout", "prefill"]
"""``prefill``: an instance that only prefills and hands the KV over."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a group of devices of one node does. ``size``: devices of the group (TP·EP of a training rank group, TP of
    an instance); ``devices`` are their ids."""

    role: PlannedRole
    size: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KindLayout:
    """The rollout side on one kind of hardware: the request classes that it serves, how its instances are laid out, and
    devices of instances that only prefill (``prefill_tp`` each) for another kind's. ``serves``: the classes as (domain,
    largest context), None for all contexts above the domain's other classes; empty: whatever comes."""

    kind: str
    classes: tuple[str, ...]
    layout: RolloutLayout
    prefill_tp: int = 0
    prefill_instances: int = 0
    serves: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that did not win, and why."""

    what: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of the planner. ``train_seconds`` and ``rollout_seconds`` are predicted for one iteration; the
    iteration takes ``seconds``, the larger. ``idle``: devices that neither side can use. ``provenance``: where the
    cost figures come from. ``search``: what the search did (probes, strategies, seconds)."""

    strategy: TrainStrategy
    train_kind: str
    rollout: tuple[KindLayout, ...]
    train_seconds: float
    rollout_seconds: float
    placements: tuple[Placement, ...]
    idle: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    provenance: str
    search: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Predicted seconds of one iteration."""
        return max(self.train_seconds, self.rollout_seconds)

    @property
    def layout(self) -> RolloutLayout:
        """The rollout layout of a plan on one kind of hardware; `ValueError` for one on several."""
        if len(self.rollout) != 1:
            kinds = ", ".join(part.kind for part in self.rollout)
            raise ValueError(f"the plan rolls out on several kinds ({kinds}); look at its parts in .rollout")
        return self.rollout[0].layout

    @property
    def rollout_gpus(self) -> int:
        """Devices that roll out, prefill instances included."""
        return sum(part.layout.gpus + part.prefill_tp * part.prefill_instances for part in self.rollout)

    def to_plain(self) -> dict[str, Any]:
        """Plain values (JSON types), the derived ones included."""
        data = asdict(self)
        data["seconds"] = self.seconds
        data["train_gpus"] = self.strategy.gpus
        data["rollout_gpus"] = self.rollout_gpus
        return data
