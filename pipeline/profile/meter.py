"""Time used by another process.

On a machine whose cores are the devices, an engine of one thread takes as long as it computes; its own CPU clock then
measures the same as a wall clock would on an idle machine, whatever else runs beside it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Clock = Literal["cpu", "wall"]


def meter(pid: int, clock: Clock) -> Callable[[], float]:
    """Reads seconds: those of the process's CPU clock (all its threads), or those of the wall. `OSError` when there is
    no such process."""
    if clock == "wall":
        return time.perf_counter
    identity = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(identity)):
        raise OSError(error, f"process {pid} has no CPU clock: {os.strerror(error)}")
    return lambda: time.clock_gettime(identity.value)


def pin(pid: int, core: int | None) -> None:
    """Keep every thread of a process, and those they start, on one core (None: where they are)."""
    if core is not None:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def two_cores() -> tuple[int | None, int | None]:
    """A core for an engine and one for a trainer; (None, None) where there are no two."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[-1]) if len(cores) > 1 else (None, None)
