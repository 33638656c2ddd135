"""Handles of results that live on disk: small enough to be the value of a Dask task, enough to reach the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from libra.resources.batches import BatchReader


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """The committed batch of one step: its trained ``version``, the ``path`` of its zarr group, and the trainer's
    ``measures``. Plain values, so it can be an edge of any Dask graph."""

    version: int
    path: str
    measures: dict[str, Any]

    def reader(self) -> BatchReader:
        """Reads the trajectories."""
        return BatchReader(self.path)

    def array(self, name: str) -> Any:
        """One array of the batch (``tokens``, ``mask``, ``logprobs``, ``versions``, ``offsets``, ``reward``, …) as a
        ``dask.array.Array``."""
        return self.reader().dask(name)

    def trajectories(self) -> Any:
        """The trajectories as a ``dask.bag.Bag`` of `libra.resources.types.Trajectory`."""
        import dask.bag

        return dask.bag.from_sequence(range(len(self.reader())), npartitions=1).map_partitions(_read, self.path)


def _read(rows: Any, path: str) -> list[Any]:
    return list(BatchReader(path).trajectories(list(rows)))
