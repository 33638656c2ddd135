"""The base of every config model, with durations and sizes as strings.

Invariants: models are frozen and refuse unknown keys; a duration is held in seconds and a size in bytes, and both print
back as what they are.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]+)\s*")


def _parse(value: Any, units: dict[str, float] | dict[str, int], noun: str, example: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        if match[2] in units:
            return float(match[1]) * units[match[2]]
        raise ValueError(f"{value!r} has the unit {match[2]!r}; a {noun} takes one of {', '.join(units)}: {example!r}")
    raise ValueError(f"{value!r} is no {noun}; write a number and a unit, as in {example!r}")


def parse_seconds(value: Any) -> float:
    """``"30 s"``, ``"5 min"``, ``"20 ms"`` or a number of seconds → seconds; ``ValueError`` says what would do."""
    return _parse(value, _SECONDS, "duration", "30 s")


def parse_bytes(value: Any) -> int:
    """``"2 GiB"``, ``"500 MB"`` or a number of bytes → bytes; ``ValueError`` says what would do."""
    return int(_parse(value, _BYTES, "size", "2 GiB"))


Seconds = Annotated[float, BeforeValidator(parse_seconds)]
"""A duration in seconds; configs may write ``"30 s"``."""
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""A size in bytes; configs may write ``"2 GiB"``."""


class Config(BaseModel):
    """Base of every config: frozen, unknown keys are errors, defaults are checked too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
