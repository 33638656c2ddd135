"""The fused form: a task a residence, which calls inline tools itself and hands over each segment as it ends."""

from __future__ import annotations

from libra.pipeline.driver.transport import Node
from libra.pipeline.ledger.draft import Draft
from libra.pipeline.run.forms import Form, Grow, Wire, draft_opening
from libra.resources.codec import pack, tool_return_from_wire, unpack
from libra.resources.errors import InfraError
from libra.tasks.residence import hand_over as hand_over_body
from libra.tasks.residence import residence as residence_body


class Residences(Form):
    """For inline tools. What a residence handed over is never sampled again: when its worker is lost, the plugin
    releases it, and the next one begins where the draft stands."""

    async def advance(self, draft: Draft, step: int, grow: Grow) -> None:
        """Residence after residence, until the draft needs its reward."""
        tool: Wire | None = None
        while draft.next != "reward":
            tool = await self._reside(draft, step, tool, grow)

    async def _reside(self, draft: Draft, step: int, tool: Wire | None, grow: Grow) -> Wire | None:
        """One residence, that begins with the return ``tool`` of the draft's call if that was made; the return after
        which the trajectory moves on, None at its end."""
        key = self.key("rollout", step, draft, len(draft.steps))
        call = draft.action["call"] if draft.action is not None and draft.next == "tool" and tool is None else None
        blob = {
            "key": key,
            "trajectory": str(draft.id),
            "tokens": draft.context,
            "max_new": self.max_turn_tokens,
            "max_turns": draft.max_turns,
            "task": draft.task,
            "history": draft.history,
            "cut": draft.cut,
            "call": call,
            "tool": tool,
        }

        def on_segment(packed: bytes) -> None:
            told = unpack(packed)
            grow(told["tool"], told["segment"], told["action"])

        nodes = [Node(key, residence_body, pack(blob))]
        payload = 0 if tool is None else len(tool_return_from_wire(tool).payload)
        left: Wire | None = (await self.driver.submit(nodes, draft_opening(draft, payload), on_segment))["tool"]
        if left is None and draft.next != "reward" and (draft.action is None or draft.action["kind"] != "cut"):
            raise InfraError(f"{key} ended, but {draft.id} is at {draft.length} tokens and still needs a {draft.next}")
        return left

    def artifact(self, draft: Draft, step: int) -> Node:
        key = self.key("rollout", step, draft, len(draft.steps))
        blob = {"key": key, "trajectory": str(draft.id), "task": draft.task, "history": draft.history}
        return Node(key, hand_over_body, pack(blob))
