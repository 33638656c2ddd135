"""The view of a run: counting, metrics and summary files, lines and the panel; and that none of it ends a run."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from synthetic_run import START, make_run

from libra.pipeline.view import events as happened
from libra.pipeline.view.display import LiveDisplay, PlainDisplay, display_for, panel, spark
from libra.pipeline.view.files import MetricsFile, read_metrics, read_summary, write_summary
from libra.pipeline.view.lines import duration
from libra.pipeline.view.monitor import RunMonitor, length_measures
from libra.pipeline.view.text import one_line, visible
from libra.pipeline.view.view import View

ANSI = "\x1b[31mred\x1b[2J\x07\x9b1A\u202e[bold]markup[/bold]<script>alert(1)</script>"


def step(version: int, now: float, **changes: Any) -> happened.StepTrained:
    values: dict[str, Any] = {
        "time": now, "version": version, "groups": 2, "staleness": (0, 1, 1, 0), "lengths": (10, 20, 30, 940),
        "rewards": (0.0, 1.0, 1.0, 1.0), "sampled": 250, "measures": {"loss": 0.5, "entropy": 1.25, "seconds": 2.0},
    }  # fmt: skip
    return happened.StepTrained(**{**values, **changes})


def ended(now: float, **changes: Any) -> happened.TrajectoryEnded:
    values: dict[str, Any] = {
        "time": now, "id": "g0m0", "stream": "train", "length": 100, "sampled": 40, "turns": 3, "end": "answer",
        "reward": 1.0, "seconds": 2.0,
    }  # fmt: skip
    return happened.TrajectoryEnded(**{**values, **changes})


STORY: list[happened.Event] = [
    happened.RunStarted(START, "demo", "runs/demo", 2, dashboard="http://127.0.0.1:8787/status"),
    happened.Progress(START + 1, "cold start", {"step": 40, "loss": 1.23456}),
    happened.Progress(START + 2, "cold start", {"step": 41, "loss": 1.2}),
    happened.EvalFinished(START + 4, 0, "before", 0.25, 8, 1, 2.0),
    happened.InFlight(START + 4, {"rollout": 4, "tool": 1}),
    happened.WaitStarted(START + 4, "w", "train", "batch", "2 groups", "rollouts that end", 120.0),
    ended(START + 6),
    *[happened.Moved(START + 6, "load", 90, 9_000, 0.5)] * 2,
    happened.Moved(START + 6, "prefill", 30, 0, 0.0),
    happened.KVRefused(START + 6, {"layout": 2, "version": 1}),
    happened.KVRefused(START + 6, {"layout": 1}),
    ended(START + 7, failure="task", reward=None, reason=f"reward broke: {ANSI}\nsecond line"),
    happened.Failed(START + 7, "infra", "g1m0", f"engine: {ANSI}", retried=True),
    happened.GroupFinished(START + 8, 1, 4, 4, "skipped"),
    happened.InFlight(START + 8, {"rollout": 0, "tool": 0}),
    happened.WaitEnded(START + 8, "w"),
    happened.InFlight(START + 8, {"train": 1}),
    step(0, START + 10),
    happened.Note(START + 10, f"a note {ANSI}"),
    step(1, START + 14, replayed=True),
    happened.EvalFinished(START + 16, 2, "after", 0.75, 8, 0, 1.0),
    happened.RunEnded(START + 16, "finished"),
]


def told(events: list[happened.Event]) -> tuple[RunMonitor, list[dict[str, Any]]]:
    monitor = RunMonitor(START)
    records = [record for event in events if (record := monitor.apply(event))]
    return monitor, records


def plain_output(events: list[happened.Event], run_dir: Path) -> str:
    stream = io.StringIO()
    view = View(run_dir, PlainDisplay(Console(file=stream, width=80)))
    view.monitor = RunMonitor(START)
    for event in events:
        view.emit(event)
    view.close()
    return stream.getvalue()


def test_plain_output_is_one_line_a_step_and_one_for_each_thing_worth_telling(tmp_path: Path) -> None:
    safe = "␛[31mred␛[2J␇\\u009b1A\\u202e[bold]markup[/bold]<script>alert(1)</script>"
    assert plain_output(STORY, tmp_path).splitlines() == [
        "demo: 2 steps in runs/demo; dashboard http://127.0.0.1:8787/status",
        "cold start: step 40, loss 1.23",
        "held-out reward 0.25 at step 0 (8 tasks, 1 failed, 2.0 s)",
        f"task failure, trajectory g0m0 dropped: reward broke: {safe} second line",
        f"infra failure, tried again: g1m0: engine: {safe}",
        "step 1/2  reward 0.75 (mean 0.75)  length p50 25 p99 913 max 940  8 tok/s  staleness ≤ 1  "
        "idle rollout 60 % (start), tool 60 % (start), train 80 % (start)  10.0 s  failures infra retried 1, task 1",
        f"a note {safe}",
        "step 2/2  reward 0.75 (mean 0.75)  length p50 25 p99 913 max 940  0 tok/s  staleness ≤ 1  "
        "idle rollout 100 % (other), tool 100 % (rollout), train 0 %  4.0 s  failures infra retried 1, task 1  "
        "replayed",
        "held-out reward 0.75 at step 2 (8 tasks, 1.0 s)",
        "demo finished at step 2 of 2 after 16 s; held-out reward 0.250 → 0.750; 2 trajectories, 200 tokens",
    ]


def test_the_panel_shows_the_run_and_no_control_character(tmp_path: Path) -> None:
    monitor, _ = told(STORY[:14])
    monitor.progress = happened.Progress(START + 2, "cold start", {"step": 41, "text": ANSI})
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None, record=True)
    console.print(panel(monitor, (0.1, 0.5, 0.9)))
    shown = console.export_text()
    for words in (
        "demo", "step 0/2", "cold start: step 41", "reward", "0.250", "4 rollout", "train: 2 groups",
        "rollouts that end", "infra retried 1, task 1", "http://127.0.0.1:8787/status", "▁▅█",
    ):  # fmt: skip
        assert words in shown
    assert not {character for character in shown if ord(character) < 32} - {"\n"}


def test_the_live_display_survives_hostile_text(tmp_path: Path) -> None:
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, color_system=None, width=120))
    view = View(tmp_path, display)
    view.monitor = RunMonitor(START)
    for event in STORY:
        view.emit(event)
    view.close()
    shown = stream.getvalue()
    assert "\x1b[31m" not in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert "␛[31mred" in shown
    assert "[bold]markup[/bold]" in shown


def test_a_stream_that_is_no_terminal_gets_lines() -> None:
    assert isinstance(display_for(Console(file=io.StringIO())), PlainDisplay)
    assert isinstance(display_for(Console(file=io.StringIO(), force_terminal=True)), LiveDisplay)


def test_the_panel_shows_every_row_of_a_step() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None, record=True)
    console.print(panel(told(STORY[:19])[0], (0.1, 0.9)))
    rows = [line.strip("│╭╮╰╯─ ").split("  ")[0] for line in console.export_text().splitlines()]
    assert [row for row in rows if row and not row.startswith("━")] == [
        "demo", "reward", "held-out", "length", "running", "staleness", "rollout time", "tool time", "train time",
        "learning", "failures", "dashboard",
    ]  # fmt: skip


def test_metrics_hold_what_a_person_asks_for_from_day_one() -> None:
    _, records = told(STORY)
    record = next(record for record in records if record["kind"] == "step")
    assert record["step"] == 1
    assert record["reward"] == 0.75
    assert record["entropy"] == 1.25
    assert record["train_seconds"] == 2.0
    assert record["seconds"] == 10.0
    assert record["staleness_max"] == 1
    assert record["length_max"] == 940
    assert record["length_tail_share"] == 0.94
    assert record["idle"]["train"] == {"start": 4.0, "batch": 4.0, "busy": 2.0}
    for name in ("length_p50", "length_p99", "tokens_per_second", "sampled_tokens", "reward_ema", "totals"):
        assert name in record


def test_the_summary_counts_everything_once() -> None:
    summary = told(STORY)[0].summary()
    assert summary["heldout_before"] == 0.25
    assert summary["heldout_after"] == 0.75
    assert summary["wall_seconds"] == 16.0
    assert summary["steps"] == 2
    assert summary["trajectories"] == 2
    assert summary["tokens"] == 200
    assert summary["failures"] == {"task": 1, "infra retried": 1}
    assert summary["skipped_groups"] == 1
    assert summary["moves"] == {
        "load": {"count": 2, "tokens": 180, "bytes": 18_000, "seconds": 1.0},
        "prefill": {"count": 1, "tokens": 30, "bytes": 0, "seconds": 0.0},
    }
    assert summary["kv_refused"] == {"layout": 3, "version": 1}
    assert summary["staleness_max"] == 1
    assert summary["outcome"] == "finished"
    assert sum(summary["idle"]["train"].values()) == pytest.approx(1.0)


def test_an_evaluation_whose_tasks_all_failed_has_no_reward(tmp_path: Path) -> None:
    events = [
        STORY[0],
        happened.EvalFinished(START + 4, 0, "before", None, 0, 8, 2.0),
        happened.RunEnded(START + 5, "failed", "all is lost"),
    ]
    assert "no held-out reward at step 0: all 8 tasks failed" in plain_output(events, tmp_path)
    monitor, records = told(events)
    assert records[0]["reward"] is None
    assert monitor.summary()["heldout_before"] is None
    console = Console(file=io.StringIO(), width=100)
    console.print(panel(monitor))


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    view = View(tmp_path)
    view.monitor = RunMonitor(START)
    for event in STORY[:19]:
        view.emit(event)
    again = View(tmp_path, resume=True)
    again.emit(happened.RunStarted(again.monitor.start, "demo", "runs/demo", 2, version=1))
    again.emit(step(1, again.monitor.start + 5))
    again.emit(happened.RunEnded(again.monitor.start + 5, "finished"))
    again.close()
    summary = read_summary(tmp_path)
    assert summary["heldout_before"] == 0.25
    assert summary["wall_seconds"] == pytest.approx(15.0)
    assert summary["trajectories"] == 2
    assert summary["failures"] == {"task": 1, "infra retried": 1}
    last = read_metrics(tmp_path).steps[-1]
    assert last["totals"]["staleness"] == {"0": 4, "1": 4}
    assert last["reward_ema"] == pytest.approx(0.75)


def test_an_evaluation_before_the_first_step_outlives_a_kill(tmp_path: Path) -> None:
    killed = View(tmp_path)
    killed.monitor = RunMonitor(START)
    for event in (*STORY[:4], ended(START + 5), ended(START + 6, stream="heldout")):
        killed.emit(event)
    again = View(tmp_path, resume=True)
    again.emit(happened.RunStarted(again.monitor.start, "demo", "runs/demo", 2))
    again.close()
    assert read_summary(tmp_path)["heldout_before"] == 0.25


def test_what_ended_after_the_last_step_is_counted_when_a_run_goes_on(tmp_path: Path) -> None:
    view = View(tmp_path)
    view.monitor = RunMonitor(START)
    for event in (STORY[0], ended(START + 1), step(0, START + 2), ended(START + 3, stream="heldout")):
        view.emit(event)
    view.emit(happened.EvalFinished(START + 4, 1, "after", 0.5, 1, 0, 1.0))
    again = View(tmp_path, resume=True)
    assert again.monitor.trajectories == view.monitor.trajectories == 2
    assert again.monitor.version == 1


def test_a_resume_that_does_not_begin_leaves_the_summary_alone(tmp_path: Path) -> None:
    stream = io.StringIO()
    first = View(tmp_path)
    for event in STORY:
        first.emit(event)
    first.close()
    before = (tmp_path / "summary.json").read_bytes()
    again = View(tmp_path, PlainDisplay(Console(file=stream, width=80)), resume=True, name="demo", steps=2)
    again.emit(happened.RunEnded(again.monitor.start, "failed", "the scheduler is gone"))
    again.close()
    assert (tmp_path / "summary.json").read_bytes() == before
    assert stream.getvalue().startswith("demo failed at step 2 of 2")


def test_a_step_replayed_after_a_kill_is_recorded_if_it_was_not_yet(tmp_path: Path) -> None:
    view = View(tmp_path)
    view.monitor = RunMonitor(START)
    view.emit(step(0, START + 1))
    again = View(tmp_path, resume=True)
    again.emit(step(0, again.monitor.start + 1, replayed=True))  # trained again since the last checkpoint
    again.emit(step(1, again.monitor.start + 2, replayed=True))  # journaled, but the kill came before its line
    again.close()
    records = read_metrics(tmp_path).steps
    assert [(record["step"], record["replayed"]) for record in records] == [(1, False), (2, True)]
    assert sum(records[-1]["totals"]["staleness"].values()) == 2 * len(step(0, START).staleness)


def test_a_step_trained_again_counts_once_when_read(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for value in (1, 2):
        file.append({"kind": "step", "step": 7, "value": value})
    file.append({"kind": "step", "step": 6, "value": float("nan"), "np": np.float32(0.5)})
    file.close()
    steps = read_metrics(tmp_path).steps
    assert [(record["step"], record["value"]) for record in steps] == [(6, None), (7, 2)]
    assert steps[0]["np"] == 0.5


def test_a_line_that_a_kill_cut_short_spoils_no_other(tmp_path: Path) -> None:
    MetricsFile(tmp_path).append({"kind": "step", "step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    MetricsFile(tmp_path).append({"kind": "step", "step": 2})
    metrics = read_metrics(tmp_path)
    assert [record["step"] for record in metrics.steps] == [1, 2]
    assert metrics.damaged == 1


def test_a_summary_is_replaced_whole(tmp_path: Path) -> None:
    write_summary(tmp_path, {"a": float("inf")})
    write_summary(tmp_path, {"b": 1})
    assert read_summary(tmp_path) == {"b": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    (tmp_path / "summary.json").write_text("{")
    assert read_summary(tmp_path) == {}


class FullDisk(PlainDisplay):
    """A display that fails."""

    def event(self, event: happened.Event, record: dict[str, Any] | None, monitor: RunMonitor) -> None:
        raise OSError(28, "No space left on device")


def test_a_failing_sink_is_reported_once_and_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    view = View(tmp_path, FullDisk(Console(file=io.StringIO())))
    view.monitor = RunMonitor(START)
    assert view._metrics is not None
    view._metrics._file.close()
    with caplog.at_level(logging.ERROR):
        for event in STORY:
            view.emit(event)
        view.tick()
        view.close()
        view.close()
    assert sorted(record.message.split(" of run")[0] for record in caplog.records) == [
        "the display", "the metrics",
    ]  # fmt: skip
    assert read_summary(tmp_path)["steps"] == 2, "the summary needs neither"


def test_a_missing_run_folder_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    view = View(tmp_path / "gone")
    view.emit(STORY[0])
    view.close()
    assert "the metrics of run" in caplog.text


def test_many_failures_of_a_kind_are_told_three_times_then_each_tenfold(tmp_path: Path) -> None:
    events: list[happened.Event] = [
        happened.Failed(START, "infra", "g1m0", "no answer", retried=True) for _ in range(250)
    ]
    lines = plain_output(events, tmp_path).splitlines()
    assert len(lines) == 5
    assert "(number 100 of its kind)" in lines[-1]


def test_memory_does_not_grow_with_the_run() -> None:
    monitor = RunMonitor(START)
    sizes = []
    for round_ in range(3):
        for index in range(5000):
            monitor.apply(ended(START + index, id=f"g{round_}{index}"))
            monitor.apply(happened.WaitStarted(START + index, f"{round_}.{index}", "train", "batch"))
            monitor.apply(happened.WaitEnded(START + index, f"{round_}.{index}"))
        monitor.apply(step(round_, START + 5000 * (round_ + 1)))
        sizes.append(len(monitor.recent_lengths) + len(monitor._rate) + len(monitor.idle.waits))
    assert sizes[0] == sizes[-1]


def test_the_reward_mean_is_unbiased_from_the_first_step() -> None:
    monitor = RunMonitor(START)
    for version in range(3):
        monitor.apply(step(version, START + version, rewards=(0.5, 0.5)))
        assert monitor.reward_ema == pytest.approx(0.5)


def test_lengths_measure_the_tail() -> None:
    measures = length_measures((10,) * 90 + (100,) * 10)
    assert measures["length_p50"] == 10
    assert measures["length_max"] == 100
    assert measures["length_tail_share"] == pytest.approx(1000 / 1900)
    assert set(length_measures(()).values()) == {None}


def test_what_a_whole_run_leaves_behind_can_be_read(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=3, groups=2, members=2)
    metrics, summary = read_metrics(tmp_path / "run"), read_summary(tmp_path / "run")
    assert [record["step"] for record in metrics.steps] == [1, 2, 3]
    assert [point["when"] for point in metrics.evaluations] == ["before", "after"]
    assert summary["heldout_after"] == 0.84
    assert summary["trajectories"] == 12
    json.dumps(summary, allow_nan=False)


def test_hidden_characters_become_visible() -> None:
    assert visible("a\x1b[0m\x00\x7f\x9b\u202e\u2066\ud800é漢😀\n\t") == "a␛[0m␀␡\\u009b\\u202e\\u2066\\ud800é漢😀\n\t"
    assert one_line("a\nb\t c" + "x" * 300, 20) == "a b cxxxxxxxxxxxxxx…"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (61, "1:01 min"), (3600, "1:00:00 h"), (3725, "1:02:05 h")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_spark_line_spans_its_values() -> None:
    assert spark((0.0, 0.5, 1.0)) == "▁▅█"
    assert spark((2.0, 2.0)) == "▁▁"
    assert spark(()) == ""


def test_the_last_frame_of_an_ended_run_waits_for_nothing_and_names_no_dead_link(tmp_path: Path) -> None:
    view = View(tmp_path)
    view.monitor = RunMonitor(START)
    view.emit(happened.RunStarted(START, "run", str(tmp_path), 2, dashboard="http://127.0.0.1:8787/status"))
    view.emit(happened.WaitStarted(START, "w", "rollout", "tool", "tool returns of 3 trajectories"))
    assert "8787" in shown(view) and "of 3 trajectories" in shown(view)
    view.emit(happened.RunEnded(START + 1, "finished"))
    assert "8787" not in shown(view) and "of 3 trajectories" not in shown(view)


def shown(view: View) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(panel(view.monitor))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from libra.pipeline.view import events\n"
        "from libra.pipeline.view.view import View, terminal\n"
        "view = View(Path(sys.argv[1]), terminal())\n"
        "for n in range(2000):\n"
        "    view.emit(events.Note(float(n), 'é' * 100))\n"
        "view.close(); print('went on', file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"?" * 100 + b"\n"
        process.stdout.close()
        said = process.stderr.read().decode()
        process.wait(60)
    assert "nobody reads the display" in said and "went on" in said and "Traceback" not in said
