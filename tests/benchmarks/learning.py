"""How well a config learns, and what it costs, without Dask: the reference loop at a lag, with its CPU split.

    cd tests && ../.venv/bin/python -m benchmarks.learning quickstart --alpha 1 seed=3 algorithm.lr=5e-4

Prints a line a step and at the end one JSON object: held-out reward before and after, CPU-seconds of the cold start, of
sampling, training and evaluation, tokens and segments.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from libra.pipeline.config import load_config
from libra.resources.types import Trajectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference_loop import ReferenceLoop


def main() -> None:
    """Run one config and print what it learned and cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--alpha", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="keeps the cold start's cache here")
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="libra-learning-"))
    config = load_config(arguments.config, arguments.overrides)
    say(json.dumps(measure(ReferenceLoop(config, folder), arguments.alpha)))


def measure(loop: ReferenceLoop, alpha: int) -> dict[str, Any]:
    """Train with ``loop`` and return rewards and costs."""
    cpu: Counter[str] = Counter()
    wall = time.monotonic()
    started = timed(cpu, "cold_start", lambda: loop.initialise(say_progress))
    before = timed(cpu, "eval", loop.evaluate)
    say(f"cold start {started} held-out before {mean(before):.3f}")
    loop.sample_batch = clocked(cpu, "sample", loop.sample_batch)  # type: ignore[method-assign]
    loop.train = clocked(cpu, "train", loop.train)  # type: ignore[method-assign]
    played = skipped = 0
    for step in loop.steps(alpha):
        groups = loop.config.batch_groups + len(step.skipped)
        played += groups * loop.config.algorithm.group_size
        skipped += len(step.skipped)
        numbers = " ".join(f"{key} {value:.4g}" for key, value in step.measures.items())
        lengths = sorted(t.length for t in step.trajectories)
        say(
            f"step {step.trained} reward {step.reward:.3f} skipped {len(step.skipped)} "
            f"lengths {lengths[len(lengths) // 2]}/{lengths[-1]} {numbers}"
        )
        if loop.config.eval.every and (step.trained + 1) % loop.config.eval.every == 0:
            say(f"held-out at {step.trained + 1} {mean(timed(cpu, 'eval', loop.evaluate)):.3f} cpu {dict(cpu)}")
    after = timed(cpu, "eval", loop.evaluate)
    stats = loop.engine.stats()
    return {
        "seed": loop.config.seed,
        "before": mean(before),
        "after": mean(after),
        "copy_p": started.get("copy_p"),
        "ends": Counter(t.end for t in after),
        "cpu": {key: round(value, 1) for key, value in cpu.items()},
        "wall": round(time.monotonic() - wall, 1),
        "trajectories": played,
        "skipped_groups": skipped,
        "sampled": stats.sampled,
        "prefilled": stats.prefilled,
        "engine_steps": stats.steps,
    }


def mean(trajectories: list[Trajectory]) -> float:
    """Mean reward."""
    return float(np.mean([t.reward for t in trajectories]))


def clocked(cpu: Counter[str], name: str, work: Any) -> Any:
    """``work``, whose process CPU is added to ``cpu[name]``."""
    return lambda *arguments: timed(cpu, name, lambda: work(*arguments))


def timed(cpu: Counter[str], name: str, work: Any) -> Any:
    """Call ``work`` and add its process CPU to ``cpu[name]``."""
    began = time.process_time()
    result = work()
    cpu[name] += time.process_time() - began  # type: ignore[assignment]
    return result


def say(text: str) -> None:
    """A line of output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_progress(fields: dict[str, Any]) -> None:
    """A line about the cold start."""
    if fields.get("step", 0) % 50 == 0:
        say(str(fields))


if __name__ == "__main__":
    main()
