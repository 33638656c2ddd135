"""What a worker's role state means for the routing table, and in which order roles change. Pure.

The pool of a scheduler and the simulator's virtual one bring the same about. Invariant: a table lists exactly the
workers that offer; one that does not any more keeps what it has staged for trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from libra.resources.types import InstanceFacts
from libra.resources.types.cluster import NO_FACTS
from libra.scheduler_plugin.roles import Duty, Phase, RoleState


class Table(Protocol):
    """Of a `libra.scheduler_plugin.routing.RoutingTable`, what a pool changes."""

    def offer(self, address: str, name: str, tp: int, slots: int, facts: InstanceFacts = NO_FACTS) -> None: ...

    def offer_tool(self, address: str) -> None: ...

    def retire(self, address: str) -> None: ...


def list_worker(
    table: Table, address: str, name: str, state: RoleState, slots: int, facts: InstanceFacts = NO_FACTS
) -> None:
    """Bring about in ``table`` what ``state`` offers. ``slots``: sequences that a rollout worker admits;
    ``facts``: what it has told."""
    if not state.offers:
        table.retire(address)  # what it has staged stays while the worker lives
    elif state.duty is not None and state.duty.role == "rollout":
        table.offer(address, name, state.duty.tp or 1, slots, facts)
    elif state.duty is not None and state.duty.role == "tool":
        table.offer_tool(address)


def in_order(duties: Mapping[str, Duty | None], wanted: Callable[[str], Duty | None]) -> list[tuple[str, Duty | None]]:
    """The orders that change what is ``wanted`` of every worker into ``duties``. What comes up first, so that requests
    find instances before others drain."""
    moved = {name: duty for name, duty in duties.items() if wanted(name) != duty}
    return sorted(moved.items(), key=lambda item: (wanted(item[0]) is not None, item[0]))


def is_there(state: RoleState | None, duty: Duty | None) -> bool:
    """Whether a worker does what it shall, or never will (it is gone, or was given up)."""
    if state is None or state.given_up or state.phase is Phase.ABSENT:
        return True
    if duty is None:
        return state.phase is Phase.IDLE
    return state.phase is Phase.READY and state.duty == duty
