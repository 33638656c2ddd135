"""Counters, and alarms for what must never happen silently.

Dask logs an exception in a plugin's hook at INFO level and goes on. Here each is counted, logged as an error and told
to the driver; a flood of the same kind is thinned, but counted in full.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger("distributed.libra")


class Alarms:
    """``tell(where, error)`` passes an alarm on to the driver."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self.counts: Counter[str] = Counter()

    def count(self, what: str) -> None:
        """Something ordinary happened once more."""
        self.counts[what] += 1

    def ring(self, where: str, error: BaseException) -> None:
        """Something in ``where`` failed that should not. Call it from the ``except`` block."""
        name = f"alarm:{where}"
        self.counts[name] += 1
        seen = self.counts[name]
        if seen <= 4 or seen & (seen - 1) == 0:
            text = f"{type(error).__name__}: {error}"
            logger.error("libra: %s failed (%d times so far): %s", where, seen, text, exc_info=error)
            self._tell(where, text if seen == 1 else f"{text} ({seen} times so far)")
