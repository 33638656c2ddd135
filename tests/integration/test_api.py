"""The public API on real Dask processes: the README's lines, steps as futures, two drivers, a user's own parts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from dask.distributed import Client

import libra
from libra.resources.batches import BatchReader
from libra.resources.errors import ClusterError, StoreError

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"rollout": 1, "tool": 1, "reward": 1, "train": 1}

pytestmark = pytest.mark.cluster


def overrides(run_dir: Path, *more: str) -> list[str]:
    return [f"run_dir={run_dir}", "eval.tasks=0", "batch_groups=2", "algorithm.group_size=4", "steps=3", *more]


def test_the_twenty_lines_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = next(block for block in blocks if "LibraLocalCluster" in block)
    assert len([line for line in script.splitlines() if line.strip()]) <= 20
    (tmp_path / "example.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"version 0: \d+ tokens, the longest trajectory has \d+\n", done.stdout)
    assert re.search(r"mean reward 0\.\d+, mean token id \d+\n", done.stdout)


def test_the_environment_of_the_readme_runs_where_it_lies(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    module = next(block for block in blocks if "class Guess(Environment)" in block)
    assert len([line for line in module.splitlines() if line.strip()]) <= 35
    (tmp_path / "guess.py").write_text(module)
    command = shlex.split(next(line for line in text.splitlines() if "environment.kind=guess:Guess" in line))
    command[0] = str(Path(sysconfig.get_path("scripts")) / command[0])  # the console script: no -m adds the folder
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "eval.tasks=4"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "guess finished at step 2 of 2" in done.stdout
    assert "ended by" in (tmp_path / "runs" / "guess" / "report.html").read_text()


@pytest.fixture(scope="module")
def client() -> Client:  # type: ignore[misc]
    with libra.LibraLocalCluster(ROLES) as cluster, Client(cluster) as connected:
        yield connected


def test_steps_are_futures_that_go_into_other_graphs(client: Client, tmp_path: Path) -> None:
    with libra.Run(libra.load_config("scripted", overrides(tmp_path / "run")), client=client) as run:
        first, second = run.step(), run.step()
        versions = client.submit(lambda *batches: [batch.version for batch in batches], first, second)
        assert versions.result(timeout=120) == [0, 1]
        batch = second.result(timeout=120)
        assert batch.array("tokens").shape == batch.array("mask").shape
        trajectories = batch.trajectories().compute()
        assert {t.reward for t in trajectories} == {0.0, 1.0}
        result = run.fit()  # what is left
    assert [b.version for b in result.batches] == [0, 1, 2]
    assert result.summary["steps"] == 3
    with pytest.raises(ClusterError, match="all are asked for"):
        run.step()


def test_a_second_driver_is_refused_by_name_and_the_first_goes_on(client: Client, tmp_path: Path) -> None:
    with libra.Run(libra.load_config("scripted", overrides(tmp_path / "a", "name=first")), client=client) as run:
        run.step().result(timeout=120)
        config = libra.load_config("scripted", overrides(tmp_path / "b", "name=second"))
        with (
            Client(client.scheduler.address) as other,
            libra.Run(config, client=other) as refused,
            pytest.raises(ClusterError, match=r"held by .*first"),
        ):
            refused.fit()
        assert run.fit().summary["steps"] == 3


def test_a_closed_run_frees_the_cluster_and_can_be_resumed(client: Client, tmp_path: Path) -> None:
    config = libra.load_config("scripted", overrides(tmp_path / "run"))
    with libra.Run(config, client=client) as run:
        run.step().result(timeout=120)
    with pytest.raises(StoreError, match="--resume"), libra.Run(config, client=client) as anew:
        anew.fit()
    with libra.Run(config, client=client, resume=True) as resumed:
        assert resumed.fit().summary["steps"] == 3


def test_an_environment_and_a_policy_by_import_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from libra.scheduler_plugin.policy.context_bounds import ContextBounds\n"
        "from libra.tasks.envs.hop import HopEnvironment\n"
        "class Env(HopEnvironment):\n"
        "    def reward(self, task, trajectory):\n"
        "        return 2.0 + super().reward(task, trajectory)\n"
    )
    config = ["environment.kind=mine:Env", *overrides(tmp_path / "run")]
    command = [sys.executable, "-m", "libra.pipeline.cli", "train", "scripted", *config]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    rewards = set(BatchReader(tmp_path / "run" / "trajectories" / "step-000000.zarr").table()["reward"].tolist())
    assert rewards == {2.0, 3.0}


def test_a_run_needs_only_the_public_api_of_dask(client: Client, tmp_path: Path) -> None:
    config = libra.load_config("scripted", overrides(tmp_path / "run", "driver.public_api=true"))
    with libra.Run(config, client=client) as run:
        summary = run.fit().summary
    assert summary["steps"] == 3
    assert summary["failures"] == {}
