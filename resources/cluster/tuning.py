"""A preload for schedulers that are launched here: less time in the garbage collector.

A scheduler holds hundreds of thousands of objects that die by reference count as tasks are forgotten; at the defaults
every full collection walks them all for next to nothing, which was measured as a tenth of the scheduler's time.
"""

from __future__ import annotations

import gc
from typing import Any

THRESHOLDS = (20_000, 20, 20)


async def dask_setup(server: Any) -> None:
    """Called by Dask when everything is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
