"""What a report shows, read from the files of a run folder.

Invariant: reads only; a file that is missing or damaged takes its part out of the report and is named in ``problems``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.pipeline.report.transcript import Transcript, transcripts
from libra.pipeline.store.run_folder import RunFolder
from libra.pipeline.view.files import Metrics, read_metrics, read_summary
from libra.pipeline.view.idle import shares
from libra.resources.batches import BatchReader
from libra.resources.errors import StoreError

BATCHES_READ = 200
"""Batches whose trajectories are counted, evenly spread over the run; the report says so when there are more."""
_STEP = re.compile(r"step-(\d+)\.zarr")


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The trained trajectories, each array of shape (n,): final context and sampled tokens, staleness (trained version
    minus oldest sampled version), reward. ``ends`` counts how they ended; ``batches``: how many were read of how many.
    """

    length: NDArray[np.int64]
    sampled: NDArray[np.int64]
    staleness: NDArray[np.int64]
    reward: NDArray[np.float64]
    ends: Counter[str]
    batches: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything the page needs."""

    folder: RunFolder
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: Metrics
    trajectories: Trajectories
    transcripts: tuple[Transcript, ...]
    problems: tuple[str, ...] = field(default=())


def collect(run_dir: Path) -> ReportData:
    """Read a run folder. `StoreError` only if it is none; whatever else is wrong becomes a problem in the report."""
    folder, problems = RunFolder.open(run_dir), []
    try:
        config = folder.read_config()
    except StoreError as error:
        config, problems = {}, [str(error)]
    metrics = read_metrics(run_dir)
    if metrics.damaged:
        problems.append(f"{metrics.damaged} lines of metrics.jsonl cannot be read")
    summary = read_summary(run_dir) or _summary_so_far(metrics)
    readers = _readers(folder, problems)
    return ReportData(
        folder=folder,
        config=config,
        summary=summary,
        metrics=metrics,
        trajectories=_trajectories(readers, problems),
        transcripts=transcripts(readers, config, folder, problems),
        problems=tuple(problems),
    )


def _summary_so_far(metrics: Metrics) -> dict[str, Any]:
    """The summary of a run that has written none: what its last step's totals say."""
    before = next((point["reward"] for point in metrics.evaluations if point["when"] == "before"), None)
    if not metrics.steps:
        return {"outcome": "unfinished", "heldout_before": before}
    last = metrics.steps[-1]
    totals = last["totals"]
    return {
        "outcome": "unfinished",
        "heldout_before": before,
        "heldout_after": None,
        "steps": last["step"],
        "wall_seconds": totals["wall_seconds"],
        "trajectories": totals["trajectories"],
        "tokens": totals["tokens"],
        "sampled_tokens": totals["sampled"],
        "failures": totals["failures"],
        "moves": totals["moves"],
        "restarts": totals["restarts"],
        "outages": totals["outages"],
        "policy": last["policy"],
        "skipped_groups": totals["groups"].get("skipped", 0),
        "dropped_groups": totals["groups"].get("unusable", 0) + totals["groups"].get("expired", 0),
        "staleness_max": max(map(int, totals["staleness"]), default=0),
        "idle": shares(totals["idle"]),
    }


def _readers(folder: RunFolder, problems: list[str]) -> dict[int, BatchReader]:
    """Readers of the committed batches by trained version, in order."""
    readers = {}
    for path in sorted(folder.trajectories.glob("step-*.zarr")):
        match = _STEP.fullmatch(path.name)
        if match is None:
            continue
        try:
            readers[int(match[1])] = BatchReader(path)
        except (StoreError, OSError, json.JSONDecodeError, KeyError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
    return readers


def _trajectories(readers: dict[int, BatchReader], problems: list[str]) -> Trajectories:
    versions = list(readers)
    stride = -(-len(versions) // BATCHES_READ) or 1
    tables, ends = [], Counter[str]()
    for version in versions[::stride]:
        try:
            table = readers[version].table()
        except (StoreError, OSError) as error:
            problems.append(f"{readers[version].path.name} cannot be read: {error}")
            continue
        trained = int(readers[version].attributes.get("version", version))
        oldest = table["oldest_version"]
        tables.append((table["length"], table["sampled"], np.where(oldest >= 0, trained - oldest, 0), table["reward"]))
        ends.update(table["end"].tolist())
    columns = [np.concatenate(parts) for parts in zip(*tables, strict=True)] or [np.empty(0)] * 4
    length, sampled, staleness, reward = columns
    return Trajectories(length, sampled, staleness, reward, ends, (len(tables), len(versions)))
