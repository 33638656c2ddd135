"""A whole run of the shipped config on two real vLLM instances, the EngineCore of one of which is killed under load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from run_harness import RunProcess, merged, summary, trained
from tiny_models import tiny_model
from vllm_parts import SIZES, VLLM

from libra.pipeline.config import read_source
from libra.tasks.envs.hop import write_tokenizer

pytestmark = [*VLLM, pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(900)]
STEPS = 40
LONG = 400.0
"""Two starts of an engine, on a slow machine."""


def checkpoint(folder: Path) -> Path:
    """An untrained model with a tokenizer."""
    tiny_model("qwen3", vocabulary=480, **SIZES).save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def config(folder: Path) -> dict[str, Any]:
    """The shipped config, smaller, with a model that need not learn to speak first."""
    changes = {
        "run_dir": str(folder / "run"),
        "steps": STEPS,
        "batch_groups": 2,
        "engine": {"slots": 8, "max_context": 192, "kv_arena": "16 MiB"},
        "buckets": [{"tp": 1, "max_context": 96, "instances": 1}, {"tp": 2, "instances": 1}],
        "trainer": {"model": str(checkpoint(folder / "model"))},
        "algorithm": {"group_size": 4},
        "environment": {"kind": "vllm_parts:CoinEnvironment", "max_turn_tokens": 24, "max_turns": 5},
        "deadlines": {"start": LONG, "load": LONG, "publish": LONG, "step": LONG},
        "staleness": {"deadline": LONG},
        "retries": {"infra": 10},
        "eval": {"tasks": 0},
        "cluster": {"dashboard": False},
    }
    _, text = read_source("vllm_cpu")
    return merged(yaml.safe_load(text), changes)


def cores(run: RunProcess) -> dict[str, psutil.Process]:
    """The EngineCore processes of the run's engines, by the worker that each belongs to."""
    found = {}
    for host in run.family():
        line = " ".join(host.cmdline())
        if "libra.tasks.child.engine_host" not in line:
            continue
        for process in host.children(recursive=True):
            if "EngineCore" in " ".join(process.cmdline()):
                found[line.rpartition(" of ")[2]] = process
    return found


def test_a_run_on_two_instances_goes_on_when_an_enginecore_is_killed(tmp_path: Path) -> None:
    with RunProcess(config(tmp_path)) as run:
        run.until_step(1, LONG)
        both = cores(run)
        assert set(both) == {"rollout-0", "rollout-1"}
        both["rollout-0"].kill()
        assert run.end(2 * LONG) == 0, run.output
        run.assert_nothing_left()
        assert "vLLM is dead" in run.output
    told = summary(tmp_path / "run")
    assert told["outcome"] == "finished"
    assert sum(trained(tmp_path / "run").values()) == STEPS * 8
    (outage,) = told["outages"]
    assert (outage["worker"], outage["role"]) == ("rollout-0", "rollout")
    assert re.search(r"vLLM is dead: its process VLLM::EngineCore \(\d+\) ended without a word", outage["reason"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "workers that lost their role" in page
    assert outage["reason"][:20] in page
