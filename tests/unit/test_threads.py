"""User code that blocks: its result, its errors, and that one that never returns holds nobody up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from child_parts import CountingEnvironment, awaited
from synthetic_run import play

from libra.resources.errors import TaskError
from libra.resources.types import TrajectoryId
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment, write_tokenizer
from libra.tasks.reward import judged_in_time
from libra.tasks.threads import in_thread


@awaited
async def test_a_call_in_a_thread_returns_and_raises_as_it_would() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(next, iter(()))


@awaited
async def test_calls_that_never_return_take_no_thread_from_others() -> None:
    gate = threading.Event()
    stuck = [asyncio.create_task(in_thread(gate.wait)) for _ in range(50)]
    assert await in_thread(divmod, 7, 2) == (3, 1)
    for task in stuck:
        task.cancel()
    assert {type(error) for error in await asyncio.gather(*stuck, return_exceptions=True)} == {asyncio.CancelledError}
    gate.set()


def test_a_process_ends_though_a_call_has_not_returned() -> None:
    code = (
        "import asyncio, threading\n"
        "from libra.tasks.threads import in_thread\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(in_thread(threading.Event().wait), 0.1)\n"
        "    except TimeoutError:\n"
        "        print('given up')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "given up\n", "")


class Hanging(CountingEnvironment):
    """Its reward never comes."""

    def reward(self, *_: object) -> float:
        threading.Event().wait()
        return 0.0


def test_a_reward_that_never_comes_is_the_task_s_failure_and_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    hop = HopEnvironment(EnvironmentConfig(), str(tmp_path / "tokenizer.json"), seed=0)
    trajectory = play(hop, TrajectoryId("train", 0, 0), 0, 1.0, 0.0)
    with pytest.raises(TaskError, match=r"the reward of g0m0 took longer than environment\.wall_timeout = 0\.1 s"):
        asyncio.run(judged_in_time(Hanging(EnvironmentConfig(), "", 0), {}, trajectory, 0.1))
    assert asyncio.run(judged_in_time(hop, trajectory.task, trajectory, 10.0)) == trajectory.reward
