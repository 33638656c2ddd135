"""``metrics.jsonl`` and ``summary.json`` of a run folder.

``metrics.jsonl`` is append-only, one JSON object a line, flushed at once: ``"kind": "step"`` for each optimizer step
and ``"kind": "eval"`` for each held-out evaluation, each with the run's ``totals`` so far, and ``"kind": "group"`` for
each group that is not stored, with what its members did. Invariants: a line that a
kill cut short spoils no other line; a step trained again after a resume has a second line, and the last one counts;
numbers that are not finite are null.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


class MetricsFile:
    """Appends records to a run's ``metrics.jsonl``; keeps the file open."""

    def __init__(self, run_dir: Path) -> None:
        """Opens the file, ending a line that was cut short. Raises `OSError`."""
        path = run_dir / METRICS
        self._file = path.open("ab")
        if path.stat().st_size and not _ends_with_newline(path):
            self._file.write(b"\n")

    def append(self, record: dict[str, Any]) -> None:
        """Write one record. Raises `OSError`."""
        self._file.write(json.dumps(_finite(record), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a metrics file holds: step records by step, evaluations in order, lines that could not be read, and records
    of groups that are not stored."""

    steps: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]
    damaged: int
    groups: tuple[dict[str, Any], ...] = ()


def read_metrics(run_dir: Path) -> Metrics:
    """The records of a run folder; a missing file holds none. Of records with the same step the last counts."""
    path = run_dir / METRICS
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[tuple[int, str], dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            if record["kind"] == "step":
                steps[record["step"]] = record
            elif record["kind"] == "group":
                groups[record["group"]] = record
            else:
                evaluations[record["version"], record["when"]] = record
        except (ValueError, KeyError, TypeError):
            damaged += bool(line.strip())
    ordered = tuple(steps[step] for step in sorted(steps))
    evaluated = tuple(sorted(evaluations.values(), key=lambda point: point["version"]))
    return Metrics(ordered, evaluated, damaged, tuple(groups.values()))


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Replace ``summary.json`` in one step. Raises `OSError`."""
    partial = run_dir / f".{SUMMARY}.partial"
    partial.write_text(json.dumps(_finite(summary), indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    partial.replace(run_dir / SUMMARY)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The summary, or ``{}`` when the run has not written one (unfinished or killed)."""
    try:
        summary = json.loads((run_dir / SUMMARY).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        return _finite(value.item())  # a numpy scalar
    return value
