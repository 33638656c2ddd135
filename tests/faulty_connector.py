"""The connector of vLLM engines under test: the product's, to which things happen for sequences of certain names.

``lost…``: the staged KV is released between EngineCore's decision to load it and the ranks' copies, as by a trajectory
that ends or an arena that is full. ``held…``: its copy into the arena waits until there is a file ``gate`` beside that.
``fails…``: the copy fails. What is published is noted in the file ``published`` beside the arena, a line each: request
and weight version.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from libra.resources.kv.arena import Arena
from libra.tasks.engines import vllm_connector

PATIENCE = 60.0


class ArenaConnector(vllm_connector.ArenaConnector):
    """See the module."""

    def _load(self, job: vllm_connector.LoadJob) -> bool:
        if job.sequence.startswith("lost"):
            with Arena(Path(job.arena), writable=True) as arena:
                arena.release(job.sequence)
        return super()._load(job)

    def _save(self, job_and_step: Any) -> None:
        request, folder = job_and_step[0].request, Path(self._own).parent
        if request.startswith("held"):
            until = time.monotonic() + PATIENCE
            while not (folder / "gate").exists() and time.monotonic() < until:
                time.sleep(0.01)
        if request.startswith("fails"):
            raise OSError("the copy failed")
        super()._save(job_and_step)

    def update_connector_output(self, connector_output: Any) -> None:
        own = self._arena(self._own)
        for request in connector_output.finished_sending or ():
            assert own is not None
            with (Path(self._own).parent / "published").open("a") as notes:
                notes.write(f"{request} {own.weight_version}\n")
        super().update_connector_output(connector_output)
