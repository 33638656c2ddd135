"""kill -9 of every kind of process of a run, twenty times: what is trained is what the unkilled run trains."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from run_harness import RunProcess, Victim, merged, run_config, staleness, steps_done, trained

from libra.pipeline.view.files import read_metrics, read_summary

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 18
STARTS = 20
"""More often than that no run is killed here, or gives up."""
CAMPAIGNS: list[list[Victim]] = [
    ["engine", "driver", "rollout", "trainer", "tool", "engine", "tool", "rollout"],
    ["trainer", "tool", "engine", "rollout", "driver", "trainer", "engine", "rollout"],
]
"""With the four kills of the last test, twenty: six drivers, four rollout workers, three tool workers, four engines and
three trainers."""
INLINE: list[Victim] = ["rollout", "engine", "driver", "rollout", "engine", "rollout", "driver", "engine"]
"""The victims of a campaign in the fused form, where a rollout worker holds the sessions too."""
AS_IT_STARTS = "driver as it starts"


def campaign_config(folder: Path, inline: bool = False) -> dict[str, Any]:
    """A run that takes its time, so that a kill may come at any instant of a step."""
    return run_config(
        folder,
        environment={"inline": inline},
        steps=STEPS,
        trainer={"options": {"train_seconds": "60 ms"}},
        engine={"options": {"slow_share": 0.05, "slow_factor": 5}},
        eval={"tasks": 4, "every": 6},
        store={"journal_sync": "100 ms"},
        deadlines={"start": "60 s", "step": "60 s"},
    )


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory: pytest.TempPathFactory) -> Counter[tuple[int, int, int]]:
    """(prompt, member, length) → how often it is trained when nobody kills anything, in the pair form."""
    folder = tmp_path_factory.mktemp("unkilled") / "run"
    at_once = {"engine": {"options": {"step_seconds": 0}}, "trainer": {"options": {"train_seconds": 0}}}
    with RunProcess(merged(campaign_config(folder), at_once)) as run:
        assert run.end() == 0, run.output
    return trained(folder)


class Campaign:
    """One run from its first start to its last step, through kills and resumes."""

    def __init__(self, folder: Path, seed: int, inline: bool = False) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.config = campaign_config(folder, inline)
        self.runs: list[RunProcess] = []
        self.told: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Campaign:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def run(self) -> RunProcess:
        """Its present process."""
        return self.runs[-1]

    def start(self) -> None:
        """Start it, or go on with it (unless it was killed before it had made its folder)."""
        assert len(self.runs) < STARTS, self.words()
        self.runs.append(self._stack.enter_context(RunProcess(self.config, resume=self.folder.exists())))

    def strike(self, victim: Victim, step: int) -> None:
        """Kill ``victim`` at a random instant after ``step`` was trained."""
        while steps_done(self.folder) < step:
            assert self.go_on(), f"finished before {victim} was killed: {self.words()}"
        time.sleep(self.random.uniform(0, 0.6))
        while not self.run.kill(victim):
            assert self.go_on(), f"finished before {victim} was killed: {self.words()}"
        self.tell(victim)

    def strike_as_it_starts(self) -> None:
        """Kill the driver at a random instant of its first seconds."""
        time.sleep(self.random.uniform(0.3, 5.0))
        assert self.run.kill("driver")
        self.tell(AS_IT_STARTS)

    def resume(self) -> None:
        """Go on after the driver's death, once everything it had started is gone."""
        self.run.assert_no_process()
        self.start()

    def go_on(self) -> bool:
        """Wait a little; resume the run if it has given up, which it must do with one clear error. False once it has
        come to its last step."""
        time.sleep(0.02)
        code = self.run.process.poll()
        if code in (None, 0):
            return code is None
        assert code == 1, self.words()
        before, found, message = self.run.output.partition("libra: ")
        assert found and not any(line.startswith("Traceback") for line in before.splitlines()), self.words()
        self.tell(f"gave up: {message.splitlines()[0]}")
        self.resume()
        return True

    def finish(self) -> None:
        """Let it come to its last step; nothing of it is left then."""
        while self.go_on():
            pass
        for run in self.runs:
            run.assert_nothing_left()

    def check(self, unkilled: Counter[tuple[int, int, int]]) -> None:
        """It trained what the unkilled run trains, nothing too stale, and its files tell of every step."""
        assert trained(self.folder) == unkilled, self.words()
        assert max(map(max, staleness(self.folder))) <= 1
        assert [record["step"] for record in read_metrics(self.folder).steps] == list(range(1, STEPS + 1))
        told = read_summary(self.folder)
        assert told["outcome"] == "finished"
        assert told["heldout_before"] == told["heldout_after"] == 0.5

    def suffer(self, victims: list[Victim]) -> None:
        """Kill ``victims`` one after another, spread over the run."""
        for number, victim in enumerate(victims):
            self.strike(victim, number * (STEPS - 2) // len(victims))
            if victim == "driver":
                self.resume()

    def tell(self, what: str) -> None:
        """Note what happened, for the message of a failure."""
        self.told.append(f"{what} (step {steps_done(self.folder)})")

    def words(self) -> str:
        """What happened, and what the run says of it."""
        return f"{'; '.join(self.told)}\n{self.run.output}"


@pytest.mark.parametrize("seed", range(len(CAMPAIGNS)))
def test_kills_change_nothing_of_what_is_trained(
    tmp_path: Path, seed: int, unkilled: Counter[tuple[int, int, int]]
) -> None:
    with Campaign(tmp_path / "run", seed) as campaign:
        campaign.suffer(CAMPAIGNS[seed])
        campaign.finish()
        campaign.check(unkilled)


def test_the_fused_form_trains_the_same_through_kills(tmp_path: Path, unkilled: Counter[tuple[int, int, int]]) -> None:
    with Campaign(tmp_path / "run", seed=4, inline=True) as campaign:
        campaign.suffer(INLINE)
        campaign.finish()
        campaign.check(unkilled)


def test_a_run_whose_resume_is_killed_too_goes_on(tmp_path: Path, unkilled: Counter[tuple[int, int, int]]) -> None:
    with Campaign(tmp_path / "run", seed=3) as campaign:
        campaign.strike("driver", 4)
        for _ in range(3):
            campaign.resume()
            campaign.strike_as_it_starts()
        campaign.resume()
        campaign.finish()
        campaign.check(unkilled)
