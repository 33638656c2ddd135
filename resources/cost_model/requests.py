"""Records as arrays, sorted by final context: what the evaluators work on.

Invariant: row i of every column is the same request, and ``context`` ascends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from libra.resources.errors import ConfigError
from libra.resources.types import RequestRecord

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Columns of shape (N,): tokens, except ``turns`` (count), ``tool_seconds`` (s), ``kvint`` (token-steps) and
    ``prefill_pairs`` (token pairs); see `RequestRecord`."""

    context: Floats
    generated: Floats
    turns: Floats
    tool_seconds: Floats
    kvint: Floats
    prefill_tokens: Floats
    prefill_pairs: Floats

    @classmethod
    def from_records(cls, records: Iterable[RequestRecord]) -> Self:
        """Sorted by context. Raises `ConfigError` when there is no record."""
        values: list[float] = []
        for r in records:
            prefilled = r.prompt + r.tool
            values += (
                prefilled + r.generated,
                r.generated,
                r.turns,
                r.tool_seconds,
                r.kvint,
                prefilled,
                r.prefill_pairs,
            )
        if not values:
            raise ConfigError("there are no request records to plan for; give a workload or a run that recorded some")
        table = np.fromiter(values, np.float64, len(values)).reshape(-1, len(fields(cls)))
        table = table[np.argsort(table[:, 0], kind="stable")]
        return cls(*np.ascontiguousarray(table.T))

    @classmethod
    def from_lengths(cls, lengths: Sequence[float] | Floats, prompt: float = 512.0) -> Self:
        """Single-turn requests without tools that end at ``lengths`` tokens after a prompt of ``prompt``."""
        context = np.sort(np.asarray(lengths, np.float64))
        start = np.minimum(prompt, context - 1)
        generated = context - start
        none = np.zeros_like(context)
        kvint = generated * start + generated * generated / 2
        return cls(context, generated, none + 1, none, kvint, start, start * start / 2)

    def take(self, rows: NDArray[np.bool_] | slice) -> Self:
        """The requests chosen by a mask or slice, order kept."""
        return type(self)(*(np.ascontiguousarray(getattr(self, f.name)[rows]) for f in fields(self)))

    def __len__(self) -> int:
        return len(self.context)
