"""A recorded quick-start run simulated: mean step seconds beside the real ones, with costs measured on this machine
right after; as measured, and corrected by how much the run's first half was slower (its engine and trainer share two
cores with driver, scheduler and workers, and with whatever else the machine does)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rows import Row, Rows
from libra.pipeline.simulate.replay import Replay, read_recording, replay
from libra.resources.calibration import load_profile

AIM = 15.0
STEPS = 12
_SECONDS = 600


def run() -> Rows:
    """All rows."""
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as name:
        folder = Path(name)
        _libra("train", "quickstart", f"steps={STEPS}", "eval.tasks=0", f"run_dir={folder / 'run'}")
        _libra("profile", "quickstart", "--out", str(folder / "profile.yaml"))
        recording, profile = read_recording(folder / "run"), load_profile(folder / "profile.yaml")
        plain, corrected = replay(recording, profile), replay(recording, profile, correct=True)

    def row(found: Replay, what: str) -> Row:
        note = f"{what}; simulated {found.simulated:.2f} s, real {found.real:.2f} s a step, {len(found.rows)} steps"
        error = 100 * abs(found.simulated / found.real - 1)
        return Row(error, "%", AIM, f"{note}; load average {os.getloadavg()[1]:.1f}")

    return {
        "replay.step_seconds_error": row(plain, "not modelled: cores shared with the control plane and each other"),
        "replay.step_seconds_error.corrected": row(corrected, "corrected by the first half, of the second"),
    }


def _libra(*arguments: str) -> None:
    command = [sys.executable, "-m", "libra.pipeline.cli", *arguments]
    subprocess.run(command, check=True, timeout=_SECONDS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
