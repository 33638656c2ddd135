"""What serving a request took, told by the workers of a real run and read back from its store, metrics and report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from run_harness import FlexibleCluster, PlayedRun, batches, run_cluster, run_config, wait_until

from libra.pipeline.report.data import collect
from libra.pipeline.report.sections import requests
from libra.pipeline.run.session import step_records
from libra.pipeline.simulate.replay import read_recording
from libra.pipeline.view.files import METRICS
from libra.resources import wire
from libra.resources.types import KVRoom, RequestRecord
from libra.resources.types.request import totals

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

BOUND = 60
KIND = "run_parts:FaultyHop"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with run_cluster(FlexibleCluster, rollout=2) as client:
        yield client


def facts(client: Client) -> dict[str, tuple[str, KVRoom | None]]:
    """What each ready instance has told: its node, and what its KV cache holds."""

    def look(dask_scheduler: Any) -> dict[str, tuple[str, KVRoom | None]]:
        claim = dask_scheduler.extensions[wire.EXTENSION].claim
        instances = () if claim is None else claim.table.instances.values()
        return {instance.name: (instance.facts.node, instance.facts.kv) for instance in instances}

    return dict(client.run_on_scheduler(look))


def test_records_of_a_run_hold_queueing_residence_by_degree_and_reach_every_reader(
    tmp_path: Path, client: Client
) -> None:
    buckets = [{"tp": 1, "max_context": BOUND, "instances": 1}, {"tp": 2, "instances": 1}]
    # More trajectories than slots, so that requests queue in their engine.
    config = run_config(tmp_path / "run", buckets=buckets, engine={"slots": 1}, cluster={"workers": {"rollout": 2}})
    run = PlayedRun(client, config)
    with run.playing() as done:
        told = wait_until("two instances", lambda: facts(client) if len(facts(client)) == 2 else None)
        done.result()
    assert set(told.values()) == {("127.0.0.1", KVRoom(256, 0))}

    stored = {int(batch.attributes["version"]): batch for _, batch in batches(run.folder)}
    records = [record for batch in stored.values() for record in batch.records(KIND)]
    assert all(record.domain == KIND for record in records)
    assert sum(record.queue_seconds for record in records) > 0
    assert {tp for record in records for tp in record.residence} == {1, 2}
    long = [record for record in records if set(record.residence) == {1, 2}]
    assert long
    assert all(record.context > BOUND for record in long)
    # An engine that a trajectory comes to has nothing of it: what it had is computed again.
    assert all(record.prefilled > record.prompt + record.tool for record in long)

    for version, batch in stored.items():
        rows = step_records(batch.path, KIND)
        assert [RequestRecord.from_plain(row) for row in json.loads(json.dumps(rows))] == batch.records(KIND)
        [step] = [s for s in collect(run.folder).metrics.steps if s["version"] == version]
        assert step["requests"] == totals(batch.records(KIND))
    shown = requests(collect(run.folder))
    assert {"queued in engines", "in engines of TP 1", "in engines of TP 2", "Σ context · tokens"} <= shown.keys()
    assert '"requests"' in (run.folder / METRICS).read_text()

    traces = [trace for group in read_recording(run.folder).groups.values() for trace in group]
    replayed = {trace.record().queue_seconds for trace in traces}
    # Of groups that taught nothing, the turns alone are known.
    assert {record.queue_seconds for record in records} | {0.0} == replayed | {0.0}
