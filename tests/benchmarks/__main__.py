"""``python -m benchmarks [NAME …]``: run benchmarks (all by default) and write ``build/bench.json``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

BENCHMARKS = (
    "control_plane",
    "control_plane_fused",
    "recovery",
    "memory",
    "kv",
    "migration",
    "cmlfq",
    "compare_policies",
    "planner",
    "calibration",
    "replay",
    "quickstart",
)
TARGET = Path(__file__).resolve().parents[2] / "build" / "bench.json"


def main(names: list[str]) -> None:
    TARGET.parent.mkdir(exist_ok=True)
    results = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    for name in names or BENCHMARKS:
        for key, row in import_module(f"benchmarks.{name}").run().items():
            results[key] = row.to_json()
            ratio = "" if results[key]["ratio"] is None else f"  ({results[key]['ratio']:.2f} × {row.reference:g})"
            sys.stdout.write(f"{key:60s} {row.value:12.4g} {row.unit}{ratio}  {row.note}\n")
            sys.stdout.flush()
        TARGET.write_text(json.dumps(results, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1:])
