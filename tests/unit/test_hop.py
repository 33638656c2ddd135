"""hop: tasks, replies, tokens that only ever extend, rewards, and the players that need no model."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from libra.resources.errors import ConfigError
from libra.resources.types import Tokens, Trajectory, TrajectoryId
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment, write_tokenizer
from libra.tasks.envs.hop_demo import script, sloppy
from libra.tasks.envs.hop_task import heldout_key, look_up
from libra.tasks.envs.hop_text import END, answer_text, call_text

Player = Callable[[str, Tokens, int], Tokens]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hop") / "tokenizer.json"
    write_tokenizer(path)
    return str(path)


@pytest.fixture
def env(tokenizer_path: str) -> HopEnvironment:
    return HopEnvironment(EnvironmentConfig(), tokenizer_path, seed=3)


def play(env: HopEnvironment, prompt: int, player: Player, max_turns: int = 20) -> Trajectory:
    """Play one training task turn by turn, as a run does."""
    task, name = env.task("train", prompt), TrajectoryId("train", prompt, 0)
    session = env.open(task, str(name), env.seed)
    prompt_ids = env.reset(task)
    tokens, mask, tools, end = prompt_ids, np.zeros(len(prompt_ids), np.int8), [], "turns"
    for turn in range(max_turns + 1):
        said = player(str(name), tokens, prompt)
        tokens, mask = np.concatenate([tokens, said]), np.concatenate([mask, np.ones(len(said), np.int8)])
        action = env.parse(said, finished=bool(len(said)) and int(said[-1]) in env.stop)
        if action.kind == "final":
            end = action.end
            break
        if turn == max_turns:
            break
        tools.append(asyncio.run(session.tool(turn, action.call)))
        payload = tools[-1].payload
        tokens, mask = np.concatenate([tokens, payload]), np.concatenate([mask, np.zeros(len(payload), np.int8)])
    draft = Trajectory(
        id=name, prompt=prompt, epoch=0, task=task, prompt_tokens=len(prompt_ids), tokens=tokens, mask=mask,
        logprobs=np.zeros(len(tokens), np.float32), versions=np.where(mask == 1, 0, -1).astype(np.int32),
        tools=tuple(tools), turns=len(tools), end=end, reward=0.0,
    )  # fmt: skip
    return draft


def test_a_competent_player_always_wins(env: HopEnvironment) -> None:
    for prompt in range(40):
        done = play(env, prompt, script)
        assert (done.end, env.reward(done.task, done)) == ("answer", 1.0), env.render(done.tokens)


def test_a_sloppy_player_wins_some(env: HopEnvironment) -> None:
    games = [play(env, prompt, sloppy) for prompt in range(150)]
    assert 0.2 < np.mean([env.reward(g.task, g) for g in games]) < 0.55
    assert {g.end for g in games} == {"answer", "malformed"}


def test_tasks_are_functions_of_their_names(env: HopEnvironment, tokenizer_path: str) -> None:
    again = HopEnvironment(EnvironmentConfig(), tokenizer_path, seed=3)
    other = HopEnvironment(EnvironmentConfig(), tokenizer_path, seed=4)
    assert [env.task("train", n) for n in range(20)] == [again.task("train", n) for n in range(20)]
    assert [env.task("train", n) for n in range(20)] != [other.task("train", n) for n in range(20)]
    assert [env.task("heldout", n) for n in range(20)] == [other.task("heldout", n) for n in range(20)]
    assert json.loads(json.dumps(env.task("train", 7))) == env.task("train", 7)


def test_held_out_tasks_never_enter_training(env: HopEnvironment) -> None:
    assert all(heldout_key(env.task("heldout", n)["start"]) for n in range(300))
    assert not any(heldout_key(env.task("train", n)["start"]) for n in range(300))


def test_chains_are_geometric_and_capped(env: HopEnvironment) -> None:
    hops = [len(env.task("train", n)["notes"]) for n in range(2000)]
    assert max(hops) == 6
    assert np.mean(np.array(hops) == 1) == pytest.approx(0.3, abs=0.04)
    assert np.mean(np.array(hops) == 6) == pytest.approx(0.7**5, abs=0.04)


def test_replies_follow_the_store(env: HopEnvironment) -> None:
    task = {"start": "ash-bay", "value": "oak-owl", "next": {"ash-bay": "elm-fig"}, "last": "elm-fig", "busy": 0.2,
            "notes": {"ash-bay": "", "elm-fig": "rose moss"}}  # fmt: skip
    ask = lambda key, uniform=0.9, name="get": look_up(task, {"name": name, "arguments": {"key": key}}, uniform)  # noqa: E731
    assert ask("ash-bay").text == '{"next": "elm-fig"}'
    assert ask("elm-fig").text == '{"value": "oak-owl", "note": "rose moss"}'
    assert ask("elm-fig", uniform=0.1).status == "busy"
    assert ask("oak-owl").text == '{"error": "no key"}'
    assert ask(["not", "text"]).status == "error"
    assert ask("ash-bay", name="rm").text == '{"error": "no tool"}'


def test_a_rebuilt_session_replays_exactly(env: HopEnvironment) -> None:
    task = env.task("train", 11) | {"busy": 0.5}
    call = {"name": "get", "arguments": {"key": task["start"]}}
    first, rebuilt, other = (env.open(task, name, 3) for name in ("g1m0", "g1m0", "g1m1"))
    replies = [asyncio.run(first.tool(turn, call)) for turn in range(30)]
    assert [asyncio.run(rebuilt.tool(turn, call)).digest for turn in range(30)] == [r.digest for r in replies]
    assert [asyncio.run(other.tool(turn, call)).digest for turn in range(30)] != [r.digest for r in replies]
    assert {r.state.status for r in replies} >= {"busy"}


@pytest.mark.parametrize(
    ("text", "kind", "end"),
    [
        (call_text("ash-bay"), "call", ""),
        (answer_text("ash-bay"), "final", "answer"),
        ('<tool_call>\n{"name": "get", "arguments": {"key": "ash-bay"}\n</tool_call>', "final", "malformed"),
        ('<tool_call>\n["get"]\n</tool_call>', "final", "malformed"),
        ('<tool_call>\n{"name": "get", "arguments": ' + "[" * 4000 + "}\n</tool_call>", "final", "malformed"),
        ("answer ash", "final", "malformed"),
        ("", "final", "malformed"),
    ],
)
def test_a_turn_is_a_call_an_answer_or_malformed(env: HopEnvironment, text: str, kind: str, end: str) -> None:
    action = env.parse(env.encode(text + END), finished=True)
    assert (action.kind, action.end) == (kind, end)


def test_a_turn_cut_at_its_limit_is_malformed(env: HopEnvironment) -> None:
    assert env.parse(env.encode(call_text("ash-bay")), finished=False).end == "malformed"


def test_no_reward_without_a_call(env: HopEnvironment) -> None:
    value = env.task("train", 5)["value"]
    guess = play(env, 5, lambda sequence, context, stream: env.encode(answer_text(value) + END))
    assert guess.end == "answer" and env.reward(guess.task, guess) == 0.0


def test_options_are_checked(tokenizer_path: str) -> None:
    with pytest.raises(ConfigError, match="max_hop"):
        HopEnvironment(EnvironmentConfig(options={"max_hop": 3}), tokenizer_path, 0)
    with pytest.raises(ConfigError, match=r"probability in \[0, 1\)"):
        HopEnvironment(EnvironmentConfig(options={"busy": [1.0]}), tokenizer_path, 0)


def test_slow_lookups_are_a_share_of_the_trajectories(tokenizer_path: str) -> None:
    options = {"latency": "1 ms", "slow_share": 0.2, "slow_latency": "10 ms"}
    env = HopEnvironment(EnvironmentConfig(options=options), tokenizer_path, 0)
    task = env.task("train", 0)
    slow = [env.open(task, f"g{n}m0", 0)._latency == 0.01 for n in range(500)]
    assert np.mean(slow) == pytest.approx(0.2, abs=0.06)


def test_demonstrations_mark_what_the_player_said(env: HopEnvironment) -> None:
    demo = env.demonstrator()
    source = random.Random(0)
    trace, drill = demo.trace(source), demo.drill(source, 6)
    assert env.render(trace.tokens).startswith("<|im_start|>user\nfind ")
    assert not trace.mask[0] and trace.mask[-1] and trace.tokens[-1] in env.stop
    for shown in (trace, drill):
        assert len(shown.tokens) == len(shown.mask) == len(shown.copies) and np.all(shown.copies <= shown.mask)
        assert all(shown.tokens[place] in shown.tokens[:place] for place in np.flatnonzero(shown.copies))
    assert int(drill.copies.sum()) == 2 * 6


def test_needs_no_torch() -> None:
    code = "import sys, libra.tasks.envs.hop_demo; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path("/"))
    assert done.stdout.strip() == "set()", done.stderr
