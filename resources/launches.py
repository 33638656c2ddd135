"""What a trainer can launch: said by each kind of trainer, kept to by the planner."""

from __future__ import annotations

from pydantic import Field

from libra.resources.config import Config


class Launches(Config):
    """Largest degrees (None: any): tensor, expert, pipeline and data parallel. The default is a single rank."""

    tp: int | None = Field(default=1, ge=1)
    ep: int | None = Field(default=1, ge=1)
    pp: int | None = Field(default=1, ge=1)
    dp: int | None = Field(default=1, ge=1)
