"""Baseline ``oracle``, for replay only: the final contexts are known.

Invariant: every segment is bound to the bucket of its trajectory's final context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from libra.resources.config import Config
from libra.scheduler_plugin.policy.base import PlacementRequest
from libra.scheduler_plugin.policy.options import parsed
from libra.scheduler_plugin.policy.static import StaticPolicy


class OracleConfig(Config):
    """Options of ``oracle``."""

    final: dict[str, int] = Field(min_length=1)
    """Final context in tokens by the trajectory's name."""


class Oracle(StaticPolicy):
    """Knows the recorded trajectories and no others: one that it does not know is a `ValueError`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._final = parsed(OracleConfig, "oracle", options).final

    def final_context(self, request: PlacementRequest) -> float:
        found = self._final.get(request.trajectory)
        if found is None:
            raise ValueError(
                f"the oracle knows {len(self._final)} recorded trajectories and not {request.trajectory}; "
                "use it for the replay of a recording only"
            )
        return found
