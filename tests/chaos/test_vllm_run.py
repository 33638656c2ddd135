"""A whole run on a real vLLM engine, whose EngineCore is killed under load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from run_harness import RunProcess, run_config, summary, trained
from tiny_models import tiny_model
from vllm_parts import SIZES, VLLM

from libra.tasks.envs.hop import write_tokenizer

pytestmark = [*VLLM, pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(900)]
STEPS = 3
LONG = 400.0
"""Two starts of an engine, on a slow machine."""


def checkpoint(folder: Path) -> Path:
    """An untrained model with a tokenizer."""
    tiny_model("qwen3", vocabulary=480, **SIZES).save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def config(folder: Path) -> dict[str, Any]:
    settings = run_config(
        folder / "run",
        steps=STEPS,
        trainer={"kind": "torch", "model": str(checkpoint(folder / "model")), "micro_batch_tokens": 1024},
        environment={"kind": "vllm_parts:CoinEnvironment", "max_turn_tokens": 24, "max_turns": 5},
        deadlines={"start": LONG, "load": LONG, "publish": LONG, "step": LONG},
        staleness={"deadline": LONG},
        retries={"infra": 10},
    )
    return settings | {"engine": {"kind": "vllm", "slots": 8, "max_context": 192, "kv_arena": "16 MiB"}}


def cores(run: RunProcess) -> list[psutil.Process]:
    """The EngineCore processes of the run's engines."""
    host = run.find("engine")
    found = [] if host is None else host.children(recursive=True)
    return [process for process in found if "EngineCore" in " ".join(process.cmdline())]


def test_a_run_goes_on_when_its_enginecore_is_killed(tmp_path: Path) -> None:
    with RunProcess(config(tmp_path)) as run:
        run.until_step(1, LONG)
        (victim,) = cores(run)
        victim.kill()
        assert run.end(2 * LONG) == 0, run.output
        run.assert_nothing_left()
        assert "vLLM is dead" in run.output
    told = summary(tmp_path / "run")
    assert told["outcome"] == "finished"
    assert told["failures"]["worker retried"] >= 1
    assert sum(trained(tmp_path / "run").values()) == STEPS * 8
