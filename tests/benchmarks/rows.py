"""What a benchmark returns: rows with a reference (a limit or a peer) beside the value."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """``ratio`` is value / reference, None where there is no reference; ``reference`` says what it is in ``note``."""

    value: float
    unit: str
    reference: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, object]:
        """A plain dict with the ratio."""
        ratio = None if not self.reference else self.value / self.reference
        return {**asdict(self), "ratio": ratio}


Rows = dict[str, Row]
