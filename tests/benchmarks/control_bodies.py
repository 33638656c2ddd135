"""Bodies of the control-plane benchmark: they do nothing but carry what real ones carry."""

from __future__ import annotations

from typing import Any

import numpy as np
from distributed import get_worker

from libra.resources import wire
from libra.resources.codec import unpack

GROWTH = 200
"""Token ids of one tool payload, and of one sampled segment."""
_PAYLOAD = np.arange(GROWTH, dtype=np.int32).tobytes()
_LOGPROBS = np.zeros(GROWTH, np.float32).tobytes()


async def rollout(blob: bytes, tool: dict[str, Any] | None = None) -> None:
    """A segment of `GROWTH` tokens with logprobs and versions after the context and the payload in its arguments."""
    request = unpack(blob)
    context = len(request["tokens"]) + (0 if tool is None else GROWTH)
    segment = {"tokens": _PAYLOAD, "logprobs": _LOGPROBS, "versions": _PAYLOAD, "context": context}
    result = {"tool": tool, "segment": segment, "action": {"kind": "call", "call": {"key": "a"}, "end": ""}}
    get_worker().state.tasks[request["key"]].metadata[wire.METADATA] = result


async def tool(blob: bytes) -> dict[str, Any]:
    """A payload of `GROWTH` tokens, and the state that the scheduler binds by."""
    request = unpack(blob)
    state = {"state": ["search", request["turn"] % 3, "ok"], "context": request["context"] + GROWTH}
    get_worker().state.tasks[request["key"]].metadata[wire.METADATA] = state
    return {"turn": request["turn"], "payload": _PAYLOAD}
