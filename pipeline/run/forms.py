"""The seam of forms: as which Dask tasks a trajectory advances.

The pair form (`libra.pipeline.run.pairs`) has a task a segment and a task a call; the fused form
(`libra.pipeline.run.residences`), for inline tools, a task a residence. Invariants of both: every segment is handed to
``grow`` exactly once and in order, with the tool return before it; whatever is raised leaves the draft as far as it was
grown, and another `Form.advance` goes on from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any

from libra.pipeline.driver.driver import Driver
from libra.pipeline.driver.transport import Node, Opening
from libra.pipeline.ledger.draft import Draft
from libra.resources.keys import Kind, TaskKey

Wire = dict[str, Any]
Grow = Callable[[Wire | None, Wire, Wire], None]
"""Takes the tool return before a segment (or None), the segment, and the action that it means, in wire forms."""


def draft_opening(draft: Draft, payload: int = 0) -> Opening:
    """What places the next rollout of ``draft``, which ``payload`` tokens precede that the draft does not have yet."""
    return Opening(draft.length + payload, f"{draft.id.stream}{draft.prompt}")


class Form(ABC):
    """Advances the drafts of one run, ``run``. ``max_turn_tokens``: sampled tokens of a turn at most."""

    def __init__(self, driver: Driver, run: str, max_turn_tokens: int) -> None:
        self.driver, self.max_turn_tokens = driver, max_turn_tokens
        self._run = run
        self._attempts = count()

    @abstractmethod
    async def advance(self, draft: Draft, step: int, grow: Grow) -> None:
        """Grow ``draft``, which needs no reward yet, by one segment or more; ``step`` goes into keys. Raises what its
        tasks raise."""

    @abstractmethod
    def artifact(self, draft: Draft, step: int) -> Node:
        """The task whose result is what the session of ``draft`` hands over at its end."""

    def key(self, kind: Kind, step: int, draft: Draft, index: int) -> str:
        """A key that was never used."""
        return str(TaskKey(kind, step, self._run, str(draft.id), index, next(self._attempts)))
