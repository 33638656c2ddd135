"""Records ``tests/data/hop_traces.json``: what `hop` trajectories did when its sloppy scripted player played them.

``cd tests && ../.venv/bin/python -m record_traces``
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
from traces import RECORDED, Trace, Turn, write

from libra.resources import rng
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment
from libra.tasks.envs.hop_demo import sloppy

SEED, PROMPTS, MEMBERS = 7, 120, 8
OPTIONS = {"max_hops": 14, "continue_p": 0.8, "busy": (0.0, 0.1, 0.2, 0.6)}


async def play(environment: HopEnvironment, prompt: int, member: int) -> Trace:
    """One trajectory of a training prompt."""
    task = environment.task("train", prompt)
    name = f"p{prompt}s0g{prompt}m{member}"
    session = environment.open(task, name, SEED)
    context = environment.reset(task)
    prompt_tokens, turns = len(context), []
    for turn in range(30):
        sampled = sloppy(name, context, rng.stream(SEED, name))
        context = np.concatenate([context, sampled])
        action = environment.parse(sampled, finished=True)
        if action.kind == "final":
            turns.append(Turn(len(sampled)))
            break
        returned = await session.tool(turn, action.call)
        turns.append(Turn(len(sampled), returned.state, len(returned.payload), 0.05))
        context = np.concatenate([context, returned.payload])
    return Trace(name, prompt_tokens, tuple(turns))


def main() -> None:
    """Play and write."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer.json")
        tokenizer.write_text(HopEnvironment.make_tokenizer())
        environment = HopEnvironment(EnvironmentConfig(options=OPTIONS), str(tokenizer), SEED)
        traces = [asyncio.run(play(environment, p, m)) for p in range(PROMPTS) for m in range(MEMBERS)]
    write(RECORDED, traces)


if __name__ == "__main__":
    main()
