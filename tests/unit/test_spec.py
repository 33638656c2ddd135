"""What a config says reaches the cluster: the spec of a claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra.pipeline.config import parse
from libra.pipeline.run.spec import make_spec
from libra.resources.errors import ConfigError
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.claims import limits_of

PLANNER = {"enabled": True, "model": "quickstart"}


def spec_of(folder: Path, **changes: Any) -> RunSpec:
    return make_spec(parse({"run_dir": str(folder), **changes}, "test"), folder / "tokenizer.json", folder)


def test_how_roles_are_drained_and_restarted_is_the_configs(tmp_path: Path) -> None:
    retries = {"restarts": 2, "backoff": "3 s", "backoff_most": "20 s"}
    deadlines = {"drain": "7 s", "start": "11 s", "load": "13 s", "stop": "17 s"}
    limits = limits_of(spec_of(tmp_path, retries=retries, deadlines=deadlines))
    assert (limits.restarts, limits.backoff, limits.backoff_most) == (2, 3.0, 20.0)
    assert (limits.drain, limits.start, limits.load, limits.stop) == (7.0, 11.0, 13.0, 17.0)


def test_the_planner_knows_what_the_run_says_of_itself(tmp_path: Path) -> None:
    planner = spec_of(tmp_path, planner=PLANNER, engine={"slots": 9}, staleness={"alpha": 2}).planner["planner"]
    assert (planner["trainer"], planner["slots"], planner["overlap"]) == ("torch", 9, 3)
    assert spec_of(tmp_path).planner == {}


def test_a_planner_that_is_told_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"planner\.planner\.slots = 9 but engine\.slots = 64"):
        spec_of(tmp_path, planner={**PLANNER, "planner": {"slots": 9}}, engine={"slots": 64})
