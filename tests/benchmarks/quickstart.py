"""The quick start as a user runs it, from an empty cache: wall time, held-out reward, idle time by cause, and the share
of CPU that the control plane takes once everything has started. ``SEEDS`` runs; about two minutes each on two free
cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.rows import Row, Rows

SEEDS = (0, 1, 2)
LIMIT_SECONDS, AIM_BEFORE, AIM_AFTER, AIM_CONTROL_SHARE = 300.0, 0.45, 0.80, 0.20
CHILDREN = ("libra.tasks.child.engine_host", "libra.tasks.child.trainer_host")


class CpuWatch:
    """CPU seconds of a process tree, by engine and trainer children and by the rest (driver, scheduler, workers), from
    the moment both children are there: by then everything else has been imported and runs."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[int, tuple[str, float]] = {}
        self._at_start: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float, float]:
        """(seconds of children, seconds of the control plane)."""
        self._ended.set()
        self._thread.join()
        used = {"child": 0.0, "control": 0.0}
        for pid, (kind, seconds) in self._seconds.items():
            used[kind] += seconds - self._at_start.get(pid, 0.0)
        return used["child"], used["control"]

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            try:
                processes = [self._root, *self._root.children(recursive=True)]
                children = 0
                for process in processes:
                    times = process.cpu_times()
                    kind = "child" if any(c in " ".join(process.cmdline()) for c in CHILDREN) else "control"
                    children += kind == "child"
                    self._seconds[process.pid] = (kind, times.user + times.system)
                if not self._at_start and children == len(CHILDREN):
                    self._at_start = {pid: seconds for pid, (_, seconds) in self._seconds.items()}
            except psutil.NoSuchProcess:
                continue


def one(seed: int, folder: Path) -> dict[str, Any]:
    """One run; its summary, and ``control_share`` of its CPU."""
    run_dir = folder / f"seed{seed}"
    command = [sys.executable, "-m", "libra.pipeline.cli", "train", "quickstart", f"seed={seed}", f"run_dir={run_dir}"]
    environment = {**os.environ, "LIBRA_CACHE_DIR": str(folder / f"cache{seed}")}
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    watch = CpuWatch(process.pid)
    try:
        code = process.wait(timeout=1200)
    finally:
        process.terminate()
    children, control = watch.stop()
    if code:
        raise RuntimeError(f"the quick start with seed {seed} ended with exit code {code}")
    summary = json.loads((run_dir / "summary.json").read_text())
    return {**summary, "process_seconds": time.perf_counter() - began, "control_share": control / (children + control)}


def run() -> Rows:
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as folder:
        runs = [one(seed, Path(folder)) for seed in SEEDS]

    def median(name: str) -> float:
        return float(np.median([r[name] for r in runs]))

    def mean(name: str) -> float:
        return float(np.mean([r[name] for r in runs]))

    spread = {name: ", ".join(f"{r[name]:.3f}" for r in runs) for name in ("heldout_before", "heldout_after")}
    seconds = "each: " + ", ".join(f"{r['process_seconds']:.0f}" for r in runs)
    rows = {
        "quickstart.wall_s": Row(median("process_seconds"), "s", LIMIT_SECONDS, seconds),
        "quickstart.heldout_before": Row(mean("heldout_before"), "reward", AIM_BEFORE, spread["heldout_before"]),
        "quickstart.heldout_after": Row(mean("heldout_after"), "reward", AIM_AFTER, spread["heldout_after"]),
        "quickstart.control_share": Row(median("control_share"), "of all CPU", AIM_CONTROL_SHARE, "driver, Dask"),
    }
    for resource, causes in runs[0]["idle"].items():
        for cause, share in causes.items():
            rows[f"quickstart.time.{resource}.{cause.replace(' ', '_')}"] = Row(share, "of its time", note="seed 0")
    return rows
