"""A recorded quick-start run simulated: mean step seconds beside the real ones, with costs measured on this machine
right after. (A machine that does other work meanwhile makes the real run slower, not the simulated one.)"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rows import Row, Rows
from libra.pipeline.simulate.replay import read_recording, replay
from libra.resources.calibration import load_profile

AIM = 15.0
STEPS = 12
_SECONDS = 600


def run() -> Rows:
    """The row."""
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as name:
        folder = Path(name)
        _libra("train", "quickstart", f"steps={STEPS}", "eval.tasks=0", f"run_dir={folder / 'run'}")
        _libra("profile", "quickstart", "--out", str(folder / "profile.yaml"))
        found = replay(read_recording(folder / "run"), load_profile(folder / "profile.yaml"))
    note = f"simulated {found.simulated:.2f} s, real {found.real:.2f} s a step, {len(found.rows)} steps"
    note += f"; load average {os.getloadavg()[1]:.1f}"
    return {"replay.step_seconds_error": Row(100 * abs(found.simulated / found.real - 1), "%", AIM, note)}


def _libra(*arguments: str) -> None:
    command = [sys.executable, "-m", "libra.pipeline.cli", *arguments]
    subprocess.run(command, check=True, timeout=_SECONDS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
