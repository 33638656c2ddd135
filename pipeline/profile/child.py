"""A child process that is being measured: kept on one core, its clock at hand, ended with its measurement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from libra.pipeline.profile.meter import Clock, meter, pin
from libra.tasks.child.parent import ChildProcess


class MeasuredChild:
    """Owns the process once `_own` was entered."""

    read: Callable[[], float]
    """Its clock."""
    _child: ChildProcess | None = None

    @property
    def child(self) -> ChildProcess:
        """Its process."""
        assert self._child is not None, "make it with start"
        return self._child

    async def stop(self) -> None:
        """End the process."""
        await self.child.stop(grace=5.0)

    @asynccontextmanager
    async def _own(self, child: ChildProcess, core: int | None, clock: Clock) -> AsyncIterator[None]:
        """Pin ``child`` to ``core``; the body brings it up; then its clock can be read. It is stopped on any error."""
        self._child = child
        try:
            pin(child.pid, core)
            yield
            self.read = meter(child.pid, clock)
        except BaseException:
            await child.stop(grace=0)
            raise
