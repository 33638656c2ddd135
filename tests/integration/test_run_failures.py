"""A failure is data: what faults of tools, judges and members do to a run, and when they end it. One cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from run_harness import PlayedRun, batches, run_cluster, run_config, wait_until

from libra.pipeline.view.events import Failed, GroupFinished, StepTrained
from libra.resources.errors import DeadlineError, LibraError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with run_cluster() as client:
        yield client


@pytest.fixture(params=[False, True], ids=["pairs", "residences"])
def inline(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def faulty(folder: Path, faults: dict[str, Any], inline: bool = False, **changes: Any) -> dict[str, Any]:
    """A run of four steps whose environment has ``faults``."""
    environment = {"inline": inline, "tool_timeout": "100 s", "options": {"faults": faults}}
    return run_config(folder, **{"steps": 4, "environment": environment, **changes})


def test_a_failure_is_no_reward_and_its_siblings_go_on(tmp_path: Path, client: Client, inline: bool) -> None:
    # m1 of every group has a broken tool, g2m2 a tool host that is down, g1m3 one that hiccups, g0m2 a broken judge.
    faults = {"task": ["m1"], "infra": ["g2m2"], "once": ["g1m3"], "judge": ["g0m2"]}
    run = PlayedRun(client, faulty(tmp_path / "run", faults, inline, retries={"infra": 2}))
    summary = run.fit()
    ended = run.recorder.ended()

    failures = {name: event.failure for name, event in ended.items() if event.failure}
    assert failures == {"g2m2": "infra", "g0m2": "task"} | {name: "task" for name in ended if name.endswith("m1")}
    assert "has no keys" in ended["g0m1"].reason
    assert "is on fire" in ended["g2m2"].reason
    assert "the judge is ill" in ended["g0m2"].reason
    assert all(event.reward is None for name, event in ended.items() if name in failures)

    retried = Counter(event.what for event in run.recorder.of(Failed) if event.kind == "infra")
    assert retried == {"g2m2": 2, "g1m3": 1}
    assert summary["failures"] == {"task": len(failures) - 1, "infra": 1, "infra retried": 3}

    trained = {str(t.id): t.reward for _, batch in batches(run.folder) for t in batch.trajectories()}
    assert not trained.keys() & failures.keys()
    assert {name: ended[name].reward for name in trained} == trained
    siblings = {name for name in trained if name.startswith(("g0m", "g1m", "g2m"))}
    # Group 2 has lost both members of one reward or the other: m0 is right, m3 is wrong, so it is still worth training.
    assert siblings == {"g0m0", "g0m3", "g1m0", "g1m2", "g1m3", "g2m0", "g2m3"}


def test_infrastructure_failures_in_a_row_stop_the_run_with_the_last_one_s_words(
    tmp_path: Path, client: Client
) -> None:
    faults = {"infra": ["m0", "m1", "m2", "m3"]}
    run = PlayedRun(client, faulty(tmp_path / "run", faults, retries={"infra": 1, "consecutive_infra": 3}))
    with pytest.raises(LibraError, match=r"\d+ infrastructure failures in a row .*the store of g\d+m\d is on fire"):
        run.fit()


def test_one_incident_that_fails_many_at_once_does_not_stop_the_run(tmp_path: Path, client: Client) -> None:
    # The first try of all 16 trajectories in flight fails, more than consecutive_infra, but they fail together.
    faults = {"once": [f"g{group}m{member}" for group in range(4) for member in range(4)]}
    run = PlayedRun(client, faulty(tmp_path / "run", faults, retries={"infra": 1, "consecutive_infra": 8}))
    assert run.fit()["failures"] == {"infra retried": 16}


def test_groups_with_equal_rewards_stop_the_run(tmp_path: Path, client: Client) -> None:
    engine = {"options": {"script": "run_parts:all_right"}}
    run = PlayedRun(client, faulty(tmp_path / "run", {}, engine=engine, groups={"max_returned": 6}))
    with pytest.raises(LibraError, match=r"6 groups in a row .* gave nothing to learn from"):
        run.fit()
    outcomes = [event.outcome for event in run.recorder.of(GroupFinished)]
    assert len(outcomes) >= 6  # more, if some ended together
    assert set(outcomes) == {"skipped"}


def test_five_prompts_and_twelve_steps_end(tmp_path: Path, client: Client) -> None:
    environment = {"options": {"prompts": 5, "max_hops": 2}}
    run = PlayedRun(client, run_config(tmp_path / "run", steps=12, environment=environment))
    assert run.fit()["steps"] == 12
    rounds: dict[int, Counter[int]] = {}
    for _, batch in batches(run.folder):
        table = batch.table()
        for group, epoch, prompt in {
            *zip(*(table[name].tolist() for name in ("group", "epoch", "prompt")), strict=True)
        }:
            assert epoch == group // 5
            rounds.setdefault(epoch, Counter())[prompt] += 1
    assert len(rounds) >= 5
    assert all(count == 1 and 0 <= prompt < 5 for epoch in rounds.values() for prompt, count in epoch.items())


def test_a_due_member_that_never_returns_fails_the_run_at_its_deadline(tmp_path: Path, client: Client) -> None:
    staleness = {"deadline": "2 s", "on_expiry": "fail"}
    run = PlayedRun(client, faulty(tmp_path / "run", {"hang": ["g1m2"]}, staleness=staleness))
    with pytest.raises(DeadlineError, match=r"waited 2 s for groups \[1\], due in batch 1 \(open: g1m2\)"):
        run.fit()


def test_a_due_member_that_never_returns_is_dropped_at_its_deadline(
    tmp_path: Path, client: Client, inline: bool
) -> None:
    staleness = {"deadline": "2 s", "on_expiry": "drop"}
    run = PlayedRun(client, faulty(tmp_path / "run", {"hang": ["g1m2"]}, inline, staleness=staleness))
    summary = run.fit()
    assert summary["steps"] == 4
    assert summary["dropped_groups"] == 1
    ended = run.recorder.ended(group=1)
    assert ended["g1m2"].failure == "infra"
    assert "not finished within staleness.deadline" in ended["g1m2"].reason
    names = {str(t.id) for _, batch in batches(run.folder) for t in batch.trajectories()}
    assert names >= {"g1m0", "g1m1", "g1m3"}  # its siblings are trained
    assert "g1m2" not in names


def test_a_blocked_tool_holds_nobody_else_up(tmp_path: Path, client: Client, inline: bool) -> None:
    gate = tmp_path / "gate"
    run = PlayedRun(client, faulty(tmp_path / "run", {"hang": ["g1m2"], "gate": str(gate)}, inline))
    with run.playing() as result:
        # All that may be admitted without it ends, and a step is trained, while one call is blocked.
        wait_until("15 other ends", lambda: len(run.recorder.ended()) >= 15)
        wait_until("a step", lambda: run.recorder.of(StepTrained))
        assert not result.done()
        assert "g1m2" not in run.recorder.ended()
        gate.touch()
        assert result.result(60)["failures"] == {}
    assert run.recorder.ended()["g1m2"].reward == 1.0
