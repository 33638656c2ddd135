"""The body of a step's coordinator: a task that ends when a batch was trained, so that steps compose into graphs."""

from __future__ import annotations

from distributed import get_worker

from libra.resources import wire
from libra.resources.codec import unpack
from libra.resources.errors import ClusterError
from libra.resources.handles import BatchHandle


async def step(blob: bytes) -> BatchHandle:
    """The handle of the batch of ``version`` of run ``run``, once trained. `ClusterError` if the run ends first."""
    fields = unpack(blob)
    scheduler = get_worker().scheduler
    record = await getattr(scheduler, wire.AWAIT_BATCH)(run=fields["run"], version=fields["version"])
    if error := record.get("error"):
        raise ClusterError(str(error))
    return BatchHandle(int(record["version"]), str(record["path"]), dict(record["measures"]))
