"""Whole runs in processes of their own: started as a user starts them, killed as fate does, and read back from disk."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import yaml
from distributed import Client

from libra.pipeline.api import Run
from libra.pipeline.config import parse
from libra.pipeline.store.run_folder import RunFolder
from libra.pipeline.view.events import Event, StepTrained, TrajectoryEnded
from libra.pipeline.view.files import read_metrics, read_summary
from libra.pipeline.view.monitor import RunMonitor
from libra.resources import wire
from libra.resources.batches import BatchReader
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.durable import Holder
from libra.resources.tags import ROLES, Role, capability
from libra.resources.weights import OWNER_FILE, SHARED_MEMORY

E = TypeVar("E", bound=Event)
T = TypeVar("T")
TESTS = Path(__file__).parent
MARK = "LIBRA_TEST_MARK"
"""Environment variable that every process of a run inherits, so that none is overlooked."""
GONE_SECONDS = 10.0
END_SECONDS = 120.0

Victim = Literal["driver", "scheduler", "rollout", "tool", "reward", "train", "engine", "trainer"]
_MODULES: dict[str, Victim] = {
    "libra.tasks.child.engine_host": "engine",
    "libra.tasks.child.trainer_host": "trainer",
    "distributed.Scheduler": "scheduler",
    '"name": "rollout-': "rollout",
    '"name": "tool-': "tool",
    '"name": "reward-': "reward",
    '"name": "train-': "train",
}


def run_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A small run in ``folder`` with scripted parts; ``changes`` replace whole sections' keys."""
    config: dict[str, Any] = {
        "name": folder.name,
        "run_dir": str(folder),
        "steps": 6,
        "batch_groups": 2,
        "engine": {
            "kind": "scripted",
            "max_context": 256,
            "options": {"script": "run_parts:half_right", "tokens_per_step": 4, "step_seconds": "2 ms"},
        },
        "trainer": {"kind": "scripted", "options": {}},
        "algorithm": {"group_size": 4},
        "environment": {"kind": "run_parts:FaultyHop", "options": {}},
        "eval": {"tasks": 0},
        "cluster": {"dashboard": False},
        "store": {"checkpoint_every": 2},
    }
    return merged(config, changes)


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``config`` with ``changes``, dicts merged key by key."""
    result = dict(config)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


class RunProcess:
    """``libra train`` in a process of its own, and all that it starts.

    Use it as a context manager: what is left at the end is killed, whatever the test found.
    """

    def __init__(self, config: dict[str, Any], *, resume: bool = False) -> None:
        self.folder = Path(config["run_dir"])
        self.mark = secrets.token_hex(8)
        self._there_before = set(SHARED_MEMORY.glob("libra-*"))
        file = self.folder.with_name(f"{self.folder.name}.yaml")
        file.write_text(yaml.safe_dump(config))
        self.log = self.folder.with_name(f"{self.folder.name}-{self.mark}.log")
        command = [str(Path(sys.executable).with_name("libra")), "train", str(file), *(["--resume"] if resume else [])]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self._environment()
            )

    def __enter__(self) -> RunProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.family():
            process.kill()
        self.process.wait(GONE_SECONDS)

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return {**os.environ, "PYTHONPATH": paths, MARK: self.mark}

    @property
    def output(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether the driver lives."""
        return self.process.poll() is None

    def family(self) -> list[psutil.Process]:
        """Every living process of the run, the driver included, orphans too."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # another user's, or gone meanwhile
        return found

    def find(self, victim: Victim) -> psutil.Process | None:
        """The run's process of that kind, if it is there now."""
        if victim == "driver":
            return psutil.Process(self.process.pid) if self.running else None
        return next((process for process in self.family() if self._kind(process) == victim), None)

    def memory(self) -> dict[Victim, int]:
        """Resident bytes of each process."""
        found = {}
        for process in self.family():
            with suppress(psutil.Error):
                kind = self._kind(process)
                assert kind is not None, process.cmdline()
                found[kind] = process.memory_info().rss
        return found

    def _kind(self, process: psutil.Process) -> Victim | None:
        if process.pid == self.process.pid:
            return "driver"
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            return None
        return next((kind for text, kind in _MODULES.items() if text in line), None)

    def kill(self, victim: Victim, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal; False if there is no such process at the moment."""
        process = self.find(victim)
        if process is None:
            return False
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def end(self, seconds: float = END_SECONDS) -> int:
        """Wait for the driver's end; its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {seconds:g} s; it printed:\n{self.output}") from None

    def until(self, what: str, condition: Callable[[], T], seconds: float = END_SECONDS) -> T:
        """Wait until ``condition()`` is true (its value); fails with the output if the driver ends before."""
        until = time.monotonic() + seconds
        while not (value := condition()):
            assert self.running, f"the run ended with {self.process.returncode} before {what}:\n{self.output}"
            assert time.monotonic() < until, f"no {what} after {seconds:g} s; the run printed:\n{self.output}"
            time.sleep(0.02)
        return value

    def until_step(self, step: int, seconds: float = END_SECONDS) -> None:
        """Wait until ``step`` is trained."""
        self.until(f"step {step}", lambda: steps_done(self.folder) >= step, seconds)

    def assert_nothing_left(self) -> None:
        """No process of the run within `GONE_SECONDS`, and nothing of it in shared memory."""
        self.assert_no_process()
        assert self.shared_memory() == []

    def assert_no_process(self) -> None:
        """The driver has ended, and every process of the run is gone within `GONE_SECONDS`."""
        self.process.wait(GONE_SECONDS)
        until = time.monotonic() + GONE_SECONDS
        while left := self.family():
            if time.monotonic() > until:
                shown = "\n".join(f"{process.pid} {self._kind(process)}" for process in left)
                raise AssertionError(f"left after {GONE_SECONDS:g} s:\n{shown}\nthe run printed:\n{self.output}")
            time.sleep(0.05)

    def shared_memory(self) -> list[Path]:
        """What the run's driver owns in shared memory, and what has come up since its start that nobody living owns
        (what its workers had)."""
        found = []
        for directory in SHARED_MEMORY.glob("libra-*"):
            holder = Holder.read(directory / OWNER_FILE)
            orphaned = directory not in self._there_before and (holder is None or not psutil.pid_exists(holder.pid))
            if orphaned or (holder is not None and holder.pid == self.process.pid):
                found.append(directory)
        return found


def steps_done(folder: Path) -> int:
    """Steps that the run's metrics tell of."""
    steps = read_metrics(folder).steps
    return int(steps[-1]["step"]) if steps else 0


def summary(folder: Path) -> dict[str, Any]:
    """``summary.json``."""
    return read_summary(folder)


def batches(folder: Path) -> Iterator[tuple[int, BatchReader]]:
    """(Trained version, batch) of every batch on disk; their versions are 0, 1, 2, … without a gap."""
    store = RunFolder.open(folder)
    paths = sorted(store.trajectories.glob("step-*.zarr"))
    assert paths == [store.batch(version) for version in range(len(paths))]
    for version, path in enumerate(paths):
        yield version, BatchReader(path)


def trained(folder: Path) -> Counter[tuple[int, int, int]]:
    """How often each (prompt, member, length) was trained; each (group, member) at most once."""
    found: Counter[tuple[int, int, int]] = Counter()
    members: Counter[tuple[int, int]] = Counter()
    for _, batch in batches(folder):
        table = batch.table()
        found.update(zip(*(table[name].tolist() for name in ("prompt", "member", "length")), strict=True))
        members.update(zip(table["group"].tolist(), table["member"].tolist(), strict=True))
    assert max(members.values(), default=1) == 1, [member for member, count in members.items() if count > 1]
    return found


def staleness(folder: Path) -> list[list[int]]:
    """Per batch on disk: the trained version less the oldest version among each trajectory's sampled tokens."""
    return [
        [version - int(t.versions[t.mask == 1].min()) for t in batch.trajectories()]
        for version, batch in batches(folder)
    ]


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind in ``metrics.jsonl``, repeated ones too."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def scheduler_state(dask_scheduler: Any) -> dict[str, Any]:
    """What a scheduler remembers, for ``client.run_on_scheduler``: of the run, if one holds it, and of its tasks."""
    plugin = dask_scheduler.extensions[wire.EXTENSION]
    claim = plugin.claim
    run = {} if claim is None else {
        "token": claim.token,
        "roles": {name: state.duty.role for name, state in plugin.pool.states.items() if state.duty is not None},
        "instances": {instance.name for instance in claim.table.instances.values()},
        "routes": len(claim.table.routes),
    }  # fmt: skip
    remembered = {"tasks": len(dask_scheduler.tasks), "groups": len(dask_scheduler.task_groups)}
    return run | remembered | {"spans": len(dask_scheduler.extensions["spans"].spans)}


class Recorder:
    """A display that keeps every event of a run, for runs in this process."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event, record: dict[str, Any] | None, monitor: RunMonitor) -> None:
        """Called by the view."""
        self.events.append(event)

    def tick(self, monitor: RunMonitor) -> None:
        """Called by the view."""

    def close(self, monitor: RunMonitor) -> None:
        """Called by the view."""

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    def ended(self, group: int | None = None) -> dict[str, TrajectoryEnded]:
        """The training trajectories that have ended, those of ``group``."""
        found = {event.id: event for event in self.of(TrajectoryEnded) if event.stream == "train"}
        return {name: event for name, event in found.items() if group is None or name.startswith(f"g{group}m")}


class FlexibleCluster(LibraLocalCluster):
    """Its workers may take any role."""

    def _worker(self, role: Role, slots: int) -> dict[str, Any]:
        worker = super()._worker(role, slots)
        worker["options"]["options"]["resources"] = {capability(each): 64 for each in ROLES}
        return worker


@contextmanager
def run_cluster(kind: type[LibraLocalCluster] = LibraLocalCluster, **workers: int) -> Iterator[Client]:
    """A client of a cluster that many runs share, one after another: a worker a role, or as many as asked for."""
    wanted: dict[Role, int] = {role: workers.get(role, 1) for role in ROLES}
    with kind(wanted, dashboard=False) as cluster, Client(cluster, set_as_default=False) as client:
        yield client


class PlayedRun:
    """A run in this process on ``client``'s cluster; `fit` returns when it has ended."""

    def __init__(self, client: Client, config: dict[str, Any], *, resume: bool = False) -> None:
        self.recorder = Recorder()
        self.folder = Path(config["run_dir"])
        self._run = Run(parse(config, "the test's config"), client=client, resume=resume, display=self.recorder)

    def fit(self) -> dict[str, Any]:
        """Run to the end; the summary. Raises the error that ended the run."""
        with self._run as run:
            return run.fit().summary

    @contextmanager
    def playing(self) -> Iterator[Future[dict[str, Any]]]:
        """Run it in a thread meanwhile; the body gets the future of its summary. It is ended with the body."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(lambda: self._run.fit().summary)
            try:
                yield future
            finally:
                self._run.close()

    def until_trained(self, more: int) -> None:
        """Wait for ``more`` steps than have been trained by now."""
        target = len(self.recorder.of(StepTrained)) + more
        wait_until(f"step {target}", lambda: len(self.recorder.of(StepTrained)) >= target)


def wait_until(what: str, condition: Callable[[], T], seconds: float = END_SECONDS) -> T:
    """Wait until ``condition()`` is true (its value)."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"no {what} after {seconds:g} s"
        time.sleep(0.02)
    return value
