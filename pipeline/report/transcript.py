"""A few trajectories as text, turn by turn.

Invariants: text is decoded from the ids by the environment's own tokenizer, for people only; what is returned is raw
text, which whoever shows it must escape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from libra.pipeline.store.run_folder import RunFolder
from libra.resources.batches import BatchReader
from libra.resources.errors import LibraError, StoreError
from libra.resources.types import Tokens, ToolReturn, Trajectory
from libra.tasks.child.host import error_text
from libra.tasks.envs import calls
from libra.tasks.envs.base import Environment, EnvironmentConfig

Decode = Callable[[Tokens], str]
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of tokens of one kind: the prompt, what the policy sampled, or what a tool returned. ``facts`` are
    short words about it."""

    kind: Literal["prompt", "policy", "tool"]
    text: str
    tokens: int
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """One trajectory of batch ``version``, and why it was chosen."""

    why: str
    version: int
    id: str
    reward: float | None
    end: str
    length: int
    task: dict[str, Any]
    blocks: tuple[Block, ...]


def transcripts(
    readers: dict[int, BatchReader], config: dict[str, Any], folder: RunFolder, problems: list[str]
) -> tuple[Transcript, ...]:
    """Two trajectories of the first batch and four of the last."""
    if not readers:
        return ()
    decode = _decoder(config, folder, problems)
    first, last = min(readers), max(readers)
    chosen: list[Transcript] = []
    for version, wanted in {first: ("best", "worst"), last: ("best", "longest", "typical", "worst")}.items():
        try:
            rows = _choose(readers[version], wanted)
            found = readers[version].trajectories(list(rows))
        except (StoreError, OSError) as error:
            problems.append(f"{readers[version].path.name} cannot be read: {error}")
            continue
        chosen.extend(_transcript(why, version, one, decode) for why, one in zip(rows.values(), found, strict=True))
    return tuple(chosen)


def _choose(reader: BatchReader, wanted: tuple[str, ...]) -> dict[int, str]:
    """Rows and why each was chosen: best and worst reward (with the most turns), longest, and of median length."""
    table = reader.table()
    reward, turns, length = table["reward"], table["turns"], table["length"]
    order = {
        "best": np.lexsort((-turns, -reward)),
        "longest": np.argsort(-length, kind="stable"),
        "typical": np.argsort(np.abs(length - np.median(length)), kind="stable"),
        "worst": np.lexsort((-turns, reward)),
    }
    words = {
        "best": "best reward",
        "longest": "longest",
        "typical": "of median length",
        "worst": "lowest reward",
    }
    rows: dict[int, str] = {}
    for name in wanted:
        row = next((int(row) for row in order[name] if int(row) not in rows), None)
        if row is not None:
            rows[row] = words[name]
    return rows


def _transcript(why: str, version: int, trajectory: Trajectory, decode: Decode) -> Transcript:
    return Transcript(
        why=why,
        version=version,
        id=str(trajectory.id),
        reward=trajectory.reward,
        end=trajectory.end,
        length=trajectory.length,
        task=trajectory.task,
        blocks=tuple(_blocks(trajectory, decode)),
    )


def _blocks(trajectory: Trajectory, decode: Decode) -> list[Block]:
    """The prompt, then stretches of equal mask; the i-th unsampled stretch after the prompt is the i-th tool return."""
    start = trajectory.prompt_tokens
    blocks = [Block("prompt", decode(trajectory.tokens[:start]), start)]
    cuts = [start, *(start + 1 + np.flatnonzero(np.diff(trajectory.mask[start:]))).tolist(), trajectory.length]
    tools = iter(trajectory.tools)
    for left, right in pairwise(cuts):
        if right <= left:
            continue
        text = decode(trajectory.tokens[left:right])
        if trajectory.mask[left]:
            versions = trajectory.versions[left:right]
            mean = float(trajectory.logprobs[left:right].mean())
            spread = f"{versions.min()}" if versions.min() == versions.max() else f"{versions.min()}–{versions.max()}"
            blocks.append(Block("policy", text, right - left, (f"version {spread}", f"mean logprob {mean:.2f}")))
        else:
            blocks.append(Block("tool", text, right - left, _tool_facts(next(tools, None))))
    return blocks


def _tool_facts(tool: ToolReturn | None) -> tuple[str, ...]:
    if tool is None:
        return ()
    call = ", ".join(f"{key}={value!r}" for key, value in tool.call.items())
    state = tool.state
    return (call, f"{state.type}, {state.status}, size class {state.size}", f"{1000 * tool.seconds:.1f} ms")


def rendered_by(environment: Environment) -> Decode:
    """The environment's `render`; where it fails, its words stand in place of the text."""

    def decode(tokens: Tokens) -> str:
        try:
            return str(environment.render(tokens))
        except Exception as error:  # noqa: BLE001 - a user's environment may raise anything; the report goes on
            return f"cannot be rendered: {error_text(error)}"

    return decode


def _decoder(config: dict[str, Any], folder: RunFolder, problems: list[str]) -> Decode:
    """The environment's rendering; without the environment its tokenizer's; without that, the ids."""
    tokenizer = folder.tokenizer / TOKENIZER_FILE
    try:
        environment = EnvironmentConfig(**config["environment"])
        made = calls.make_environment(environment, str(tokenizer), int(config["seed"]))
        return rendered_by(made)
    except Exception as error:  # noqa: BLE001 - a user's environment may raise anything; the report does without
        why = str(error) if isinstance(error, LibraError) else repr(error)
        problems.append(f"the environment cannot be made here ({why}): trajectories are decoded without it")
    try:
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception
        problems.append(f"{tokenizer} cannot be read ({error}): trajectories are shown as token ids")
        return lambda tokens: " ".join(map(str, tokens.tolist()))
    return lambda tokens: str(plain.decode(tokens.tolist(), skip_special_tokens=False))
