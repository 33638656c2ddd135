"""What is known of a run, accumulated from its events.

Invariants: pure (no clock, no I/O); memory grows with the number of evaluations only; feeding the same events gives the
same numbers; a monitor restored from a record's ``totals`` goes on counting from there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from libra.pipeline.view import events as happened
from libra.pipeline.view.idle import IdleAccount, Seconds, difference, shares
from libra.pipeline.view.restarts import Restarts

EMA_DECAY = 0.8
RECENT = 1024
_RATE_WINDOW = 30.0


class Heldout(TypedDict):
    """One held-out evaluation; ``reward`` is None if all its tasks failed."""

    version: int
    when: str
    reward: float | None
    tasks: int
    failures: int
    seconds: float


class RunMonitor:
    """Counts, averages and states of one run; `apply` is the only way to change it."""

    def __init__(self, start: float) -> None:
        """``start``: Unix seconds at which the run's clock begins."""
        self.start = self.now = start
        self.wall_before = 0.0
        self.name, self.run_dir, self.steps, self.version = "", "", 0, 0
        self.dashboard: str | None = None
        self.outcome, self.error = "unfinished", ""
        self.extra: dict[str, Any] = {}
        self.roles: dict[str, happened.RoleChanged] = {}
        self.progress: happened.Progress | None = None
        self.idle = IdleAccount(start)
        self.idle.phase = "start"
        self.trajectories = self.tokens = self.sampled = 0
        self.failures: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self.moves: dict[str, dict[str, float]] = {}
        self.kv_refused: Counter[str] = Counter()
        self.restarts = Restarts()
        self.policy: dict[str, float] = {}
        self.staleness: Counter[int] = Counter()
        self.heldout: list[Heldout] = []
        self.reward: float | None = None
        self.measures: dict[str, float] = {}
        self.recent_lengths: deque[int] = deque(maxlen=RECENT)
        self._ema = self._ema_weight = 0.0
        self._rate: deque[tuple[float, int]] = deque(maxlen=4 * RECENT)
        self._last_step = start
        self._first_step: float | None = None
        self._steps_after_first = 0
        self._last_idle: Seconds = {}
        self._last_published: float | None = None
        self._load: Mapping[str, int] = {}
        self._recorded = 0
        self._step_tokens = self._step_sampled = 0

    def restore(self, step: int, totals: Mapping[str, Any] | None, evaluations: Iterable[Heldout]) -> None:
        """Go on where the records of an earlier process end: after ``step`` steps, with the ``totals`` of its newest
        record (None: it has none) and its evaluations."""
        self.version = self._recorded = step
        self.heldout = list(evaluations)
        if totals is None:
            return
        self.wall_before = totals["wall_seconds"]
        self.trajectories, self.tokens, self.sampled = totals["trajectories"], totals["tokens"], totals["sampled"]
        self.failures.update(totals["failures"])
        self.groups.update(totals["groups"])
        self.moves = {way: dict(sums) for way, sums in totals["moves"].items()}
        self.kv_refused.update(totals["kv_refused"])
        self.restarts.restore(totals["restarts"], totals["outages"])
        self.staleness.update({int(key): count for key, count in totals["staleness"].items()})
        self._ema, self._ema_weight = totals["ema"]
        self.idle = IdleAccount(self.start, totals["idle"])
        self.idle.phase = "start"
        self._last_idle = self.idle.seconds()

    def apply(self, event: happened.Event) -> dict[str, Any] | None:
        """Take one event in; returns the record for the metrics file if the event makes one (a step, an evaluation, a
        group that is not stored)."""
        self.advance(event.time)
        match event:
            case happened.RunStarted():
                self.name, self.run_dir, self.steps = event.name, event.run_dir, event.steps
                self.version, self.dashboard = event.version, event.dashboard
            case happened.Progress():
                self.progress = event
            case happened.RoleChanged():
                self.roles[event.worker] = event
                self.restarts.role_changed(event, self.wall_seconds)
            case happened.InFlight():
                self.idle.in_flight(event)
            case happened.Worked():
                self._begun()
                self.idle.worked(event)
            case happened.Moved():
                self._moved(event)
            case happened.KVRefused():
                self.kv_refused.update(event.reasons)
            case happened.Load():
                self._load = event.running
            case happened.PolicyState():
                self.policy = dict(event.measures)
            case happened.WaitStarted():
                self.idle.wait_started(event)
            case happened.WaitEnded():
                self.idle.wait_ended(event)
            case happened.TrajectoryEnded():
                self._trajectory(event)
            case happened.GroupFinished():
                self.groups[event.outcome] += 1
                if event.played:
                    return {"kind": "group", "group": event.group, "outcome": event.outcome, "played": event.played}
            case happened.StepTrained():
                return self._step(event)
            case happened.Published():
                self._last_published = event.seconds
            case happened.EvalFinished():
                return self._evaluation(event)
            case happened.Failed():
                self.failures[f"{event.kind} retried" if event.retried else event.kind] += 1
                if event.kind == "worker":
                    self.restarts.worker_gone(event.what, event.reason, self.wall_seconds)
            case happened.RunEnded():
                self.outcome, self.error, self.extra = event.outcome, event.error, dict(event.extra)
            case happened.Note():
                pass
        return None

    def advance(self, time: float) -> None:
        """Let time pass until ``time``."""
        self.now = max(self.now, time)
        self.idle.advance(time)

    @property
    def wall_seconds(self) -> float:
        """Seconds of the run so far, those before a resume included."""
        return self.wall_before + self.now - self.start

    @property
    def reward_ema(self) -> float | None:
        """Bias-corrected exponential mean of the steps' mean rewards (decay 0.8); None before the first step."""
        return self._ema / self._ema_weight if self._ema_weight else None

    def running(self, resource: str) -> int:
        """What runs on a resource now: its last `Load`, else its count in flight."""
        loads = [number for unit, number in self._load.items() if unit.partition("/")[0] == resource]
        return sum(loads) if loads else self.idle.count(resource)

    @property
    def staleness_max(self) -> int:
        """Largest staleness of a trained sequence."""
        return max(self.staleness, default=0)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of the trajectories that ended in the last 30 seconds, by the second."""
        since = self.now - _RATE_WINDOW
        recent = [tokens for time, tokens in self._rate if time >= since]
        return sum(recent) / min(_RATE_WINDOW, max(self.now - self.start, 1.0))

    def length_quantiles(self) -> tuple[float | None, float | None, float | None]:
        """p50, p99 and greatest final context of the last 1,024 training trajectories, in tokens."""
        measures = length_measures(tuple(self.recent_lengths))
        return measures["length_p50"], measures["length_p99"], measures["length_max"]

    @property
    def seconds_left(self) -> float | None:
        """Steps left at the pace of this process's steps; None before there is a pace."""
        if self._first_step is None or self._steps_after_first == 0:
            return None
        return (self.steps - self.version) * (self._last_step - self._first_step) / self._steps_after_first

    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``: plain values."""
        before = next((point["reward"] for point in self.heldout if point["when"] == "before"), None)
        after = next((point["reward"] for point in reversed(self.heldout) if point["when"] == "after"), None)
        return {
            "name": self.name,
            "outcome": self.outcome,
            "error": self.error,
            "heldout_before": before,
            "heldout_after": after,
            "wall_seconds": self.wall_seconds,
            "steps": self.version,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            "sampled_tokens": self.sampled,
            "failures": dict(self.failures),
            "moves": self.moves,
            "kv_refused": dict(self.kv_refused),
            "restarts": self.restarts.count,
            "outages": self.restarts.plain(),
            "policy": self.policy,
            "skipped_groups": self.groups["skipped"],
            "dropped_groups": self.groups["unusable"] + self.groups["expired"],
            "staleness_max": self.staleness_max,
            "idle": shares(self.idle.seconds()),
            "heldout": self.heldout,
            **self.extra,
        }

    def _begun(self) -> None:
        """Something has been rolled out, so the start is over."""
        if self.idle.phase == "start":
            self.idle.phase = None

    def _trajectory(self, event: happened.TrajectoryEnded) -> None:
        self._begun()
        self.trajectories += 1
        self.tokens += event.length
        self.sampled += event.sampled
        self._step_tokens += event.length
        self._step_sampled += event.sampled
        self._rate.append((event.time, event.sampled))
        if event.failure is not None:
            self.failures[event.failure] += 1
        elif event.stream == "train":
            self.recent_lengths.append(event.length)

    def _moved(self, event: happened.Moved) -> None:
        sums = self.moves.setdefault(event.way, {"count": 0, "tokens": 0, "bytes": 0, "seconds": 0.0})
        told = {"count": 1, "tokens": event.tokens, "bytes": event.bytes, "seconds": event.seconds}
        for name, value in told.items():
            sums[name] += value

    def _step(self, event: happened.StepTrained) -> dict[str, Any] | None:
        if event.replayed and event.version < self._recorded:
            return None
        self.version = self._recorded = event.version + 1
        if self.version >= self.steps:
            self.idle.phase = "end"
        self.reward = float(np.mean(event.rewards)) if event.rewards else None
        if self.reward is not None:
            self._ema = EMA_DECAY * self._ema + (1 - EMA_DECAY) * self.reward
            self._ema_weight = EMA_DECAY * self._ema_weight + (1 - EMA_DECAY)
        self.staleness.update(event.staleness)
        self.measures = dict(event.measures)
        seconds, idle = event.time - self._last_step, self.idle.seconds()
        record = {
            "kind": "step",
            "step": self.version,
            "version": event.version,
            "time": event.time,
            "seconds": seconds,
            "reward": self.reward,
            "reward_ema": self.reward_ema,
            "groups": event.groups,
            "sequences": len(event.lengths),
            **length_measures(event.lengths),
            "tokens": self._step_tokens,
            "sampled_tokens": self._step_sampled,
            "tokens_per_second": self._step_sampled / seconds if seconds > 0 else None,
            "staleness_mean": float(np.mean(event.staleness)) if event.staleness else None,
            "staleness_max": max(event.staleness, default=None),
            **{("train_seconds" if name == "seconds" else name): value for name, value in event.measures.items()},
            "requests": dict(event.requests),
            "policy": self.policy,
            "publish_seconds": self._last_published,
            "idle": difference(idle, self._last_idle),
            "replayed": event.replayed,
            "totals": self._totals(idle),
        }
        if self._first_step is None:
            self._first_step = event.time
        else:
            self._steps_after_first += 1
        self._last_step, self._last_idle = event.time, idle
        self._step_tokens = self._step_sampled = 0
        return record

    def _evaluation(self, event: happened.EvalFinished) -> dict[str, Any]:
        point = Heldout(
            version=event.version, when=event.when, reward=event.reward, tasks=event.tasks, failures=event.failures,
            seconds=event.seconds,
        )  # fmt: skip
        earlier = [old for old in self.heldout if (old["version"], old["when"]) != (event.version, event.when)]
        self.heldout = [*earlier, point]
        return {"kind": "eval", "time": event.time, **point, "totals": self._totals(self.idle.seconds())}

    def _totals(self, idle: Seconds) -> dict[str, Any]:
        return {
            "wall_seconds": self.wall_seconds,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            "sampled": self.sampled,
            "failures": dict(self.failures),
            "groups": dict(self.groups),
            "moves": {way: dict(sums) for way, sums in self.moves.items()},
            "kv_refused": dict(self.kv_refused),
            "restarts": self.restarts.count,
            "outages": self.restarts.plain(),
            "staleness": {str(value): count for value, count in sorted(self.staleness.items())},
            "idle": idle,
            "ema": [self._ema, self._ema_weight],
        }


def length_measures(lengths: Sequence[int]) -> dict[str, float | None]:
    """p50, p90, p99, largest and mean of final contexts in tokens, and the share of all their tokens that stands in the
    longest tenth of the trajectories (at least one)."""
    names = ("length_p50", "length_p90", "length_p99", "length_max", "length_mean", "length_tail_share")
    if not lengths:
        return dict.fromkeys(names)
    ordered = np.sort(np.asarray(lengths, np.int64))
    longest = ordered[-max(1, len(ordered) // 10) :]
    p50, p90, p99 = np.percentile(ordered, (50, 90, 99))
    tail = float(longest.sum() / max(int(ordered.sum()), 1))
    values = (float(p50), float(p90), float(p99), int(ordered[-1]), float(ordered.mean()), tail)
    return dict(zip(names, values, strict=True))
