"""The pair form: each tool call is a task, and so is the segment that continues from it, submitted together."""

from __future__ import annotations

from libra.pipeline.driver.transport import Node
from libra.pipeline.ledger.draft import Draft
from libra.pipeline.run.forms import Form, Grow, Wire, draft_opening
from libra.resources.codec import pack
from libra.tasks.rollout import rollout as rollout_body
from libra.tasks.tool import tool as tool_body


class Pairs(Form):
    """For tools of any kind, on workers of their own."""

    async def advance(self, draft: Draft, step: int, grow: Grow) -> None:
        """One segment: ``rollout``, or the pair ``tool`` → ``rollout``, whose place is bound at the tool's return."""
        index, context = len(draft.steps), draft.context
        key = self.key("rollout", step, draft, index)
        blob = {
            "key": key,
            "trajectory": str(draft.id),
            "turn": index,
            "tokens": context,
            "max_new": self.max_turn_tokens,
            "heldout": draft.id.stream == "heldout",
            "cut": draft.cut,
        }
        if draft.next == "rollout":
            nodes = [Node(key, rollout_body, pack(blob))]
            result = await self.driver.submit(nodes, draft_opening(draft))
        else:
            tool_key = self.key("tool", step, draft, len(draft.tools))
            call = self._call(draft, tool_key, draft.action)
            nodes = [Node(tool_key, tool_body, call), Node(key, rollout_body, pack(blob), tool_key)]
            result = await self.driver.submit(nodes)
        grow(result.get("tool"), result["segment"], result["action"])

    def artifact(self, draft: Draft, step: int) -> Node:
        key = self.key("tool", step, draft, len(draft.tools))
        return Node(key, tool_body, self._call(draft, key, None))

    def _call(self, draft: Draft, key: str, action: Wire | None) -> bytes:
        """The tool task's blob: the call of ``action``, or (None) the session's end, which hands over its artifact."""
        return pack(
            {
                "key": key,
                "trajectory": str(draft.id),
                "turn": len(draft.tools),
                "call": {} if action is None else action["call"],
                "task": draft.task,
                "history": draft.history,
                "context": draft.length,
                "finish": action is None,
            }
        )
