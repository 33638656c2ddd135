"""A trajectory in the making.

Invariants: the context is the prompt, then step by step a tool payload (if any, mask 0) and the segment sampled after
it (mask 1), each extending the last exactly; what comes next is a function of the steps alone, so that a draft rebuilt
from the journal goes on where the killed run stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from libra.resources.types import NOT_SAMPLED, Failure, Segment, Tokens, ToolReturn, Trajectory, TrajectoryId

Next = Literal["rollout", "tool", "reward"]


@dataclass(slots=True)
class Draft:
    """One trajectory from admission to reward.

    ``oldest``: the lowest version that a sampled token has, or can yet have while nothing was sampled. ``length``: the
    context in tokens. ``max_turns``: tool calls at most. ``action``: what the last segment means (None at the start).
    """

    id: TrajectoryId
    prompt: int
    epoch: int
    task: dict[str, Any]
    prompt_tokens: Tokens
    oldest: int
    max_turns: int
    started: float
    steps: list[tuple[ToolReturn | None, Segment]] = field(default_factory=list)
    action: dict[str, Any] | None = None
    length: int = 0
    sampled: bool = False

    def __post_init__(self) -> None:
        self.length = len(self.prompt_tokens)

    def grow(self, tool: ToolReturn | None, segment: Segment, action: dict[str, Any]) -> None:
        """Add a tool return (if any) and the segment sampled after it. ``ValueError`` if they do not extend the
        context exactly."""
        length = self.length + (len(tool.payload) if tool else 0)
        if segment.context != length:
            raise ValueError(
                f"{self.id}: a segment sampled after {segment.context} tokens extends a context of {length}"
            )
        self.steps.append((tool, segment))
        self.action = action
        self.length = length + len(segment.tokens)
        if len(segment.versions):
            oldest = int(segment.versions.min())
            self.oldest = min(self.oldest, oldest) if self.sampled else oldest
            self.sampled = True

    def restart(self, floor: int) -> None:
        """Go back to the prompt; tokens sampled from now on have at least version ``floor``."""
        self.steps, self.action, self.oldest, self.sampled = [], None, floor, False
        self.length = len(self.prompt_tokens)

    @property
    def tools(self) -> tuple[ToolReturn, ...]:
        """The tool returns so far, by turn."""
        return tuple(tool for tool, _ in self.steps if tool is not None)

    @property
    def next(self) -> Next:
        """What the trajectory needs now."""
        if self.action is None or self.action["kind"] == "cut":
            return "rollout"
        if self.action["kind"] == "call" and len(self.tools) < self.max_turns:
            return "tool"
        return "reward"

    @property
    def cut(self) -> int:
        """Tokens of the last turn if it was cut short and goes on, else 0."""
        if self.action is None or self.action["kind"] != "cut":
            return 0
        count = 0
        for tool, segment in reversed(self.steps):
            if segment.finish != "abort":
                break
            count += len(segment.tokens)
            if tool is not None:
                break
        return count

    @property
    def end(self) -> str:
        """How it ended, in the environment's words; ``turns`` at the limit of calls, ``open`` if it did not end."""
        if self.action is None or self.action["kind"] == "cut":
            return "open"
        return "turns" if self.action["kind"] == "call" else str(self.action["end"])

    @property
    def context(self) -> Tokens:
        """Every token so far, int32 of shape (length,)."""
        return np.concatenate([tokens for tokens, _ in self._parts()]).astype(np.int32, copy=False)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The calls so far with the digests of their payloads: what rebuilds a lost session."""
        return [{"call": tool.call, "digest": tool.digest} for tool in self.tools]

    def finish(
        self, reward: float | None, failure: Failure | None, artifact: dict[str, Any], ended: float
    ) -> Trajectory:
        """The finished trajectory."""
        masks, logprobs, versions = [], [], []
        for tokens, segment in self._parts():
            n = len(tokens)
            masks.append(np.full(n, segment is not None, np.int8))
            logprobs.append(segment.logprobs if segment else np.zeros(n, np.float32))
            versions.append(segment.versions if segment else np.full(n, NOT_SAMPLED, np.int32))
        return Trajectory(
            id=self.id,
            prompt=self.prompt,
            epoch=self.epoch,
            task=self.task,
            prompt_tokens=len(self.prompt_tokens),
            tokens=self.context,
            mask=np.concatenate(masks),
            logprobs=np.concatenate(logprobs).astype(np.float32, copy=False),
            versions=np.concatenate(versions).astype(np.int32, copy=False),
            tools=self.tools,
            turns=sum(segment.finish != "abort" for _, segment in self.steps),
            end=self.end,
            reward=reward,
            failure=failure,
            started=self.started,
            ended=ended,
            generate_seconds=sum(segment.ended - segment.started for _, segment in self.steps),
            tool_seconds=sum(tool.seconds for tool in self.tools),
            artifact=artifact,
            segments=tuple(segment.served() for _, segment in self.steps),
        )

    def _parts(self) -> list[tuple[Tokens, Segment | None]]:
        parts: list[tuple[Tokens, Segment | None]] = [(self.prompt_tokens, None)]
        for tool, segment in self.steps:
            if tool is not None:
                parts.append((tool.payload, None))
            parts.append((segment.tokens, segment))
        return parts
