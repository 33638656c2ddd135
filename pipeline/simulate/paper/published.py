"""The published figures, as data: what was measured, its value, and where it was published.

The published test bed is what the simulated ones use: 6 nodes, 48 A800-80G, 200 Gb/s RoCE, GRPO, contexts up to 40,960
tokens, 16 samples a prompt, Qwen3-14B (and Qwen3-30B-A3B). Invariant: a figure has an experiment that simulates it
under its key, or ``missing`` says why none can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Relation = Literal["=", "<=", ">="]


@dataclass(frozen=True, slots=True)
class Published:
    """One figure. ``relation``: the figure itself, or a bound from above or below. ``missing``: why it is not
    simulated (empty: it is)."""

    key: str
    group: str
    name: str
    unit: str
    value: float
    source: str
    relation: Relation = "="
    missing: str = ""


_PAPER = "the paper"
_REAL = "not simulated: an error against measurements of real models on the published hardware; "
_MEASURED = f"{_REAL}`libra profile` reports the held-out error of this machine's costs"
_SPLIT = f"{_REAL}a simulated training time would be compared with itself"
_REWARD = "not simulated: traces have lengths and tool states, no rewards"
_INPUT = "not simulated: an input of the simulated runs (scenario: {}), timed on the published hardware"
_SYSTEM = "not simulated: a claim about another implementation"
_NPU = "not simulated: one recorded run on 48 Ascend NPUs; no spec of that device, and rewards, are modelled"
_TASK = "not simulated: the traces are those of a code agent, not of {}"


def _ablation() -> list[Published]:
    name = "ablation, R2E-Gym, 14B: {}"
    rungs = [
        ("static uniform", "uniform", 423.0), ("+ planner, homogeneous TP", "planner", 510.0),
        ("+ heterogeneous TP", "heterogeneous", 551.0), ("+ C-MLFQ", "cmlfq", 666.0), ("+ elastic", "elastic", 763.0),
    ]  # fmt: skip
    found = [
        Published(f"ablation.{key}", "ablation", name.format(what), "tok/s/GPU", value, f"{_PAPER}, ablation")
        for what, key, value in rungs
    ]
    steps = [("homogeneous planner", "planner", 87.0), ("heterogeneous TP", "heterogeneous", 41.0),
             ("C-MLFQ", "cmlfq", 115.0), ("elastic", "elastic", 97.0)]  # fmt: skip
    found += [
        Published(f"ablation.gain.{key}", "ablation", name.format(f"gain by {what}"), "tok/s/GPU", value,
                  f"{_PAPER}, ablation")
        for what, key, value in steps
    ]  # fmt: skip
    total = Published(
        "ablation.total", "ablation", name.format("total gain"), "%", 80.4, f"{_PAPER}, ablation and abstract"
    )
    return [*found, total]


PUBLISHED: tuple[Published, ...] = (
    Published("tail.tokens", "tail", "longest tenth, share of the KV token-steps (at least)", "%", 50,
              f"{_PAPER}, motivation: 'over half of rollout time'", ">="),
    Published("tail.life", "tail", "longest tenth, share of the time on engines (at least)", "%", 50,
              f"{_PAPER}, motivation: 'over half of rollout time'", ">="),
    Published("tail.makespan", "tail", "time after nine tenths have ended, share of a rollout (at least)", "%", 50,
              f"{_PAPER}, motivation: 'over half of rollout time'", ">="),
    Published("growth.rollout", "growth", "rollout time, 32K over 1K tokens (32B, 4 × TP 8, 512 requests)", "×", 95,
              f"{_PAPER}, Fig. 2a"),
    Published("growth.training", "growth", "training time, 32K over 1K tokens (32B, PP2·TP4·DP2, batch 4096)", "×",
              3.9, f"{_PAPER}, Fig. 2"),
    Published("drift.first", "drift", "mean length at the start of a run", "tokens", 2500, f"{_PAPER}, motivation"),
    Published("drift.last", "drift", "mean length at the end of a run", "tokens", 11_500, f"{_PAPER}, motivation"),
    Published("tools.first", "drift", "tool tokens grow, first example, to (from 1,000)", "tokens", 8000,
              f"{_PAPER}, motivation", missing="not simulated: single trajectories of a real agent, quoted"),
    Published("tools.second", "drift", "tool tokens grow, second example, to (from 12,500)", "tokens", 21_000,
              f"{_PAPER}, motivation", missing="not simulated: single trajectories of a real agent, quoted"),
    Published("tools.extreme", "drift", "longest context that tool returns lead to (more than)", "tokens", 40_000,
              f"{_PAPER}, motivation", ">="),
    Published("points.tp1.short", "throughput", "8 × TP 1 at 0–2K tokens, 8 GPUs, 14B, batch 512", "tok/s/GPU", 1852,
              f"{_PAPER}, TP degree against length"),
    Published("points.tp8.short", "throughput", "1 × TP 8 at 0–2K tokens, 8 GPUs, 14B, batch 512", "tok/s/GPU", 591,
              f"{_PAPER}, TP degree against length"),
    Published("points.tp1.long", "throughput", "8 × TP 1 at 16–32K tokens, 8 GPUs, 14B, batch 512", "tok/s/GPU", 430,
              f"{_PAPER}, TP degree against length"),
    Published("points.tp8.long", "throughput", "1 × TP 8 at 16–32K tokens, 8 GPUs, 14B, batch 512", "tok/s/GPU", 1220,
              f"{_PAPER}, TP degree against length"),
    Published("points.ratio.short", "throughput", "TP 1 over TP 8 at 0–2K tokens", "×", 3.1,
              f"{_PAPER}, TP degree against length"),
    Published("points.ratio.long", "throughput", "TP 8 over TP 1 at 16–32K tokens", "×", 2.8,
              f"{_PAPER}, TP degree against length"),
    Published("error.rollout.least", "errors", "rollout cost model, error, least (512 to 40K tokens)", "% MAPE", 3.1,
              f"{_PAPER}, cost model", missing=_MEASURED),
    Published("error.rollout.most", "errors", "rollout cost model, error, most (512 to 40K tokens)", "% MAPE", 5.9,
              f"{_PAPER}, cost model", missing=_MEASURED),
    Published("error.train.tp4pp2dp2", "errors", "training cost model, error, 14B, TP4·PP2·DP2", "% MAPE", 2.42,
              f"{_PAPER}, cost model", missing=_SPLIT),
    Published("error.train.tp4pp4dp1", "errors", "training cost model, error, 14B, TP4·PP4·DP1", "% MAPE", 2.61,
              f"{_PAPER}, cost model", missing=_SPLIT),
    Published("error.train.tp2ep4pp2dp2", "errors", "training cost model, error, 30B-A3B, TP2·EP4·PP2·DP2", "% MAPE",
              5.46, f"{_PAPER}, cost model", missing=_SPLIT),
    Published("error.train.tp4ep2pp4dp1", "errors", "training cost model, error, 30B-A3B, TP4·EP2·PP4·DP1", "% MAPE",
              5.05, f"{_PAPER}, cost model", missing=_SPLIT),
    Published("error.step.mean", "errors", "iteration time over 100 configs, mean error", "% MAPE", 6.35,
              f"{_PAPER}, cost model", missing=_MEASURED),
    Published("error.step.most", "errors", "iteration time over 100 configs, largest error", "%", 9.30,
              f"{_PAPER}, cost model", missing=_MEASURED),
    Published("gain.search", "end to end", "throughput over a colocated system, search (Search-R1)", "%", 300,
              f"{_PAPER}, end to end; abstract: 'up to 3.0x higher'", missing=_TASK.format("search")),
    Published("gain.math", "end to end", "throughput over a colocated system, math (DAPO)", "%", 196,
              f"{_PAPER}, end to end", missing=_TASK.format("mathematics without tools")),
    Published("gain.swe", "end to end", "throughput over a colocated system, software (R2E-Gym)", "%", 209,
              f"{_PAPER}, end to end"),
    Published("search_r1.throughput", "end to end", "Search-R1, mean throughput", "tok/s", 2700,
              f"{_PAPER}, end to end", missing=_TASK.format("search")),
    Published("search_r1.over_static", "end to end", "Search-R1, over an asynchronous static-optimal system", "%", 63,
              f"{_PAPER}, end to end", missing=_TASK.format("search")),
    Published("reward.colocated", "end to end", "time to target reward, shorter than colocated by up to", "×", 2.5,
              f"{_PAPER}, end to end", missing=_REWARD),
    Published("reward.static", "end to end", "time to target reward, shorter than static-optimal by", "×", 1.6,
              f"{_PAPER}, end to end", missing=_REWARD),
    Published("reward.search", "end to end", "time to target reward, Search-R1", "h", 17.9, f"{_PAPER}, end to end",
              missing=_REWARD),
    Published("reward.math", "end to end", "time to target reward, DAPO", "h", 26.7, f"{_PAPER}, end to end",
              missing=_REWARD),
    Published("reward.swe", "end to end", "time to target reward, R2E-Gym", "h", 63.2, f"{_PAPER}, end to end",
              missing=_REWARD),
    *_ablation(),
    Published("routing.cmlfq", "routing", "C-MLFQ, right decisions", "%", 91.1, f"{_PAPER}, routing"),
    Published("routing.embedding", "routing", "embedding length predictor, right decisions", "%", 65.2,
              f"{_PAPER}, routing"),
    Published("routing.mlfq", "routing", "MLFQ, right decisions", "%", 44.8, f"{_PAPER}, routing"),
    Published("moved.cmlfq", "routing", "C-MLFQ, tokens moved over tokens", "%", 8.2, f"{_PAPER}, routing"),
    Published("moved.mlfq", "routing", "MLFQ, tokens moved over tokens (more than)", "%", 100, f"{_PAPER}, routing",
              ">="),
    Published("migration.same", "migration", "KV of 40K tokens, 14B, same node (less than)", "ms", 330,
              f"{_PAPER}, KV migration", "<="),
    Published("migration.other", "migration", "KV of 40K tokens, 14B, other node (at most)", "ms", 733,
              f"{_PAPER}, KV migration", "<="),
    Published("switch.activation", "switching", "training to rollout: activation of an engine", "s", 10.8,
              f"{_PAPER}, switching", missing=_INPUT.format("activation_seconds")),
    Published("switch.snapshot", "switching", "rollout to training: background snapshot", "s", 3.6,
              f"{_PAPER}, switching", missing=_INPUT.format("part of join_seconds")),
    Published("switch.restore", "switching", "rollout to training: restore over RDMA", "s", 4.4,
              f"{_PAPER}, switching", missing=_INPUT.format("part of join_seconds")),
    Published("switch.channel", "switching", "channel registration and alignment ('tens of ms', less than)", "ms", 100,
              f"{_PAPER}, switching", "<=", "not simulated: joins cost join_seconds, not divided further"),
    Published("switch.step", "switching", "mean step, R2E-Gym", "s", 454.16, f"{_PAPER}, switching"),
    Published("switch.share", "switching", "switching over step time (less than)", "%", 3.5, f"{_PAPER}, switching",
              "<="),
    Published("switch.spike", "switching", "spike of a synchronous join, each change", "s", 150,
              f"{_PAPER}, switching", missing="not simulated: only joins that do not stop the core are modelled"),
    Published("search.plain", "search", "planner search at 128 GPUs, without memoisation", "s", 12.3,
              f"{_PAPER}, planner",
              missing="not simulated: the search here has no repeated rollout search to leave a memo out of"),
    Published("search.memo", "search", "planner search at 128 GPUs", "s", 1.9, f"{_PAPER}, planner"),
    Published("code.lines", "claims", "lines of code, about", "lines", 13_000, _PAPER, missing=_SYSTEM),
    Published("v3.throughput", "claims", "v3: throughput, up to", "×", 4.2, "documentation of v3, 2026-09-16",
              missing=_SYSTEM),
    Published("v3.reward", "claims", "v3: reward convergence, up to", "×", 2.7, "documentation of v3, 2026-09-16",
              missing=_REWARD),
    Published("npu.seconds", "claims", "NPU run: 100 steps", "s", 7536.7, "the public repository's NPU run",
              missing=_NPU),
    Published("npu.reward_first", "claims", "NPU run: reward of the first 10 steps", "", 0.2778,
              "the public repository's NPU run", missing=_NPU),
    Published("npu.reward_last", "claims", "NPU run: reward of the last 10 steps", "", 0.3829,
              "the public repository's NPU run", missing=_NPU),
    Published("npu.throughput", "claims", "NPU run: generated, steady", "tok/s", 313.7,
              "the public repository's NPU run", missing=_NPU),
    Published("npu.sync", "claims", "NPU run: weight sync and checkpoints, share of time", "%", 32.8,
              "the public repository's NPU run", missing=_NPU),
    Published("npu.rollout", "claims", "NPU run: rollout, share of a steady step", "%", 94.2,
              "the public repository's NPU run", missing=_NPU),
)  # fmt: skip
"""Every one, in the order in which they are shown."""

BY_KEY = {figure.key: figure for figure in PUBLISHED}
