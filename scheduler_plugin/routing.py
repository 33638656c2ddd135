"""Where every trajectory stands: its context, its tool returns, the instance with its KV, the worker with its session.

Pure: fed by the plugin, asked by it, no Dask. Invariants: an instance's load is the sum over the trajectories whose KV
it holds; a trajectory that has ended leaves nothing behind; only instances and tool workers that are offered now are
ever answered; where KV is staged, an instance that a trajectory has left keeps it until a segment elsewhere has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from libra.resources.tags import rollout_tag
from libra.resources.types import Bucket, InstanceFacts, RolloutInstance, ToolState
from libra.resources.types.cluster import NO_FACTS
from libra.scheduler_plugin.policy import BucketPolicy, FinishedTrajectory, Placement, PlacementRequest
from libra.scheduler_plugin.policy.moves import MoveEstimate


class Route:
    """One live trajectory. ``prompt``: its prompt's key; ``context``: tokens before its next segment, None while nobody
    has told; ``held``: the tokens that count towards ``instance``'s load; ``left``: instances, the last one last, that
    may hold staged KV of it, and ``move``: what the policy expected of its way from there."""

    __slots__ = ("context", "held", "history", "instance", "left", "move", "prompt", "session")

    def __init__(self) -> None:
        self.prompt = ""
        self.context: int | None = None
        self.held = 0
        self.history: list[ToolState] = []
        self.instance: str | None = None
        self.session: str | None = None
        self.left: list[str] = []
        self.move: MoveEstimate | None = None


class RoutingTable:
    """The routing table of one run. ``staging``: whether instances stage KV, which moves with its trajectory."""

    def __init__(self, policy: BucketPolicy, buckets: Sequence[Bucket], staging: bool = False) -> None:
        self.policy, self.staging = policy, staging
        self.buckets = tuple(buckets)
        self.routes: dict[str, Route] = {}
        self.instances: dict[str, RolloutInstance] = {}
        self.retired: dict[str, RolloutInstance] = {}
        """Instances that take nothing any more but keep staged KV."""
        self.tools: dict[str, int] = {}
        """Sessions by address of the tool workers that are ready."""
        self._tags = frozenset(rollout_tag(bucket.tp) for bucket in buckets)
        self._listed: list[RolloutInstance] | None = None
        self._places: dict[str, int] = {}

    def rebucket(self, buckets: Sequence[Bucket]) -> None:
        """Other buckets from now on. What is bound stays where it is."""
        self.buckets = tuple(buckets)
        self._tags = frozenset(rollout_tag(bucket.tp) for bucket in buckets)

    # Instances and tool workers come and go.

    def offer(self, address: str, name: str, tp: int, slots: int, facts: InstanceFacts = NO_FACTS) -> None:
        """A rollout instance takes segments from now on."""
        self.instances[address] = RolloutInstance(address, name, tp, slots, 0, 0, facts)
        self.retired.pop(address, None)
        self._listed = None

    def offer_tool(self, address: str) -> None:
        """A tool worker takes calls from now on."""
        self.tools.setdefault(address, 0)

    def retire(self, address: str) -> None:
        """A rollout instance takes nothing any more. Where KV is staged, it keeps what it holds for trajectories."""
        instance = self.instances.get(address)
        if not self.staging or instance is None:
            self.withdraw(address)
            return
        staying = [route for route in self.routes.values() if route.instance == address]
        self.withdraw(address)
        self.retired[address] = instance
        for route in staying:
            route.left.append(address)

    def awaited(self, address: str) -> bool:
        """Whether an instance keeps staged KV for trajectories that have not arrived elsewhere yet."""
        return any(address in route.left for route in self.routes.values())

    def withdraw(self, address: str) -> None:
        """A worker takes nothing any more, and what it held for trajectories is gone."""
        self.retired.pop(address, None)
        if self.instances.pop(address, None) is not None:
            self._listed = None
            for route in self.routes.values():
                if route.instance == address:
                    route.instance, route.held = None, 0
        for route in self.routes.values() if self.staging else ():
            if address in route.left:
                route.left.remove(address)
        if self.tools.pop(address, None) is not None:
            for route in self.routes.values():
                if route.session == address:
                    route.session = None

    # Trajectories advance.

    def open(self, trajectory: str, prompt: str, context: int, returns: int) -> None:
        """A rollout without a tool task before it will come, after at most ``returns`` tool returns (0: it begins the
        trajectory, maybe again)."""
        route = self._route(trajectory)
        route.prompt, route.context = prompt, context
        del route.history[returns:]

    def returned(self, trajectory: str, turn: int, state: ToolState, context: int) -> None:
        """Call number ``turn`` has returned, maybe again; the context has grown to ``context``."""
        route = self._route(trajectory)
        route.context = context
        del route.history[turn:]
        route.history.append(state)

    def place(self, trajectory: str) -> tuple[Placement, str | None]:
        """Where the trajectory's next segment runs, and the instance that has to forget it since that is now another
        one (where KV is staged, none yet: see `arrived`).

        Raises what the policy raises, and `ValueError` for an answer that is no valid placement.
        """
        route = self.routes.get(trajectory)
        if route is None or route.context is None:
            raise ValueError(
                f"nobody has told the context of trajectory {trajectory}: its graph came without `libra-open`"
            )
        if self._listed is None:
            self._listed = list(self.instances.values())
            self._places = {instance.address: place for place, instance in enumerate(self._listed)}
        request = PlacementRequest(trajectory, route.prompt, route.context, route.history, route.instance)
        placement = self.policy.place(request, self._listed, self.buckets)
        self._check(placement)
        if placement.address is None:
            placement = Placement(placement.tag, self._any(placement.tag, route.instance), placement.move)
        left = self._hold(route, placement.address)
        if not self.staging:
            return placement, left
        if left is not None:
            route.left.append(left)
            route.move = placement.move
        if placement.address in route.left:
            route.left.remove(placement.address)
        return placement, None

    def sources(self, trajectory: str) -> tuple[list[RolloutInstance], MoveEstimate | None]:
        """The instances that may hold staged KV of a trajectory that has left them, the last one first, and what the
        policy expected of its way from there."""
        route = self.routes.get(trajectory)
        if route is None:
            return [], None
        there = self.instances | self.retired
        return [there[address] for address in reversed(route.left)], route.move

    def arrived(self, trajectory: str) -> list[str]:
        """A segment of the trajectory has ended where it is now: the instances that have to forget it."""
        route = self.routes.get(trajectory)
        if route is None or route.instance is None or not route.left:
            return []  # what was cut short has its KV where it was
        left, route.left, route.move = route.left, [], None
        return left

    def session(self, trajectory: str) -> str | None:
        """The tool worker with the trajectory's session; the first call opens it on the least loaded one. None: no tool
        worker is ready."""
        route = self._route(trajectory)
        if route.session is None and self.tools:
            route.session = min(self.tools, key=lambda address: (self.tools[address], address))
            self.tools[route.session] += 1
        return route.session

    def end(self, ended: Iterable[tuple[str, int | None]]) -> dict[str, list[str]]:
        """Trajectories that have ended, each with its final context (None: it failed, or was given up), by address of
        the workers that hold something of theirs."""
        holders: dict[str, list[str]] = {}
        for trajectory, context in ended:
            route = self.routes.pop(trajectory, None)
            if route is None:
                continue
            for address in (self._hold(route, None), route.session, *route.left):
                if address is not None:
                    holders.setdefault(address, []).append(trajectory)
            if route.session in self.tools:
                self.tools[route.session] -= 1
            self.policy.observe(FinishedTrajectory(trajectory, route.prompt, context, route.history))
        return holders

    def _route(self, trajectory: str) -> Route:
        route = self.routes.get(trajectory)
        if route is None:
            route = self.routes[trajectory] = Route()
        return route

    def _check(self, placement: Placement) -> None:
        if placement.tag not in self._tags:
            raise ValueError(
                f"the bucket policy answered the tag {placement.tag!r}; buckets have {', '.join(sorted(self._tags))}"
            )
        if placement.address is not None:
            instance = self.instances.get(placement.address)
            if instance is None or rollout_tag(instance.tp) != placement.tag:
                raise ValueError(
                    f"the bucket policy answered instance {placement.address!r} for {placement.tag}; it is not ready "
                    "there"
                )

    def _any(self, tag: str, current: str | None) -> str | None:
        """An instance of the tag: ``current`` if it is one, else the least loaded; None while none is ready."""
        ready = [instance for instance in self.instances.values() if rollout_tag(instance.tp) == tag]
        if any(instance.address == current for instance in ready):
            return current
        return min(ready, key=lambda i: (i.tokens, i.sequences, i.name)).address if ready else None

    def _hold(self, route: Route, address: str | None) -> str | None:
        """Move a trajectory's load to ``address``; the instance it came from, if that is another one."""
        old = route.instance
        if old is not None and old != address:
            self._count(old, -1, -route.held)
        if address is not None:
            context = route.context or 0
            if old == address:
                self._count(address, 0, context - route.held)
            else:
                self._count(address, 1, context)
            route.held = context
        else:
            route.held = 0
        route.instance = address
        return old if old != address else None

    def _count(self, address: str, sequences: int, tokens: int) -> None:
        i = self.instances[address]
        changed = RolloutInstance(i.address, i.name, i.tp, i.slots, i.sequences + sequences, i.tokens + tokens, i.facts)
        self.instances[address] = changed
        if self._listed is not None:
            self._listed[self._places[address]] = changed
