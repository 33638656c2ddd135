"""Planning needs neither torch nor distributed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["libra.pipeline.commands.plan_view", "libra.scheduler_plugin.planner.rescoring"])
def test_the_planner_imports_no_heavy_part(module: str) -> None:
    heavy = ("torch", "distributed", "transformers", "vllm")
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
