"""The engines without a model: scripts, recordings, pace, and the uniform distribution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_parts import STOP

from libra.resources.errors import ConfigError
from libra.resources.rng import uniforms
from libra.resources.weights import publish_weights
from libra.tasks.engines.base import Engine, EngineConfig, Generated, GenerateRequest
from libra.tasks.engines.random import RandomEngine
from libra.tasks.engines.scripted import ScriptedEngine

PROMPT = [9, 9]


def make(kind: type[Engine], tmp_path: Path, slots: int = 64, **options: Any) -> Engine:
    config = EngineConfig(kind="under test", slots=slots, max_context=4000, options=options)
    engine = kind(config, tokenizer_path=None, deterministic=True)
    engine.load(publish_weights(tmp_path, 0, {"w": np.zeros(1)}, {}))
    return engine


def ask(engine: Engine, sequence: str, context: list[int], max_new: int = 100, temperature: float = 1.0) -> None:
    tokens = np.array(context, np.int32)
    engine.submit(GenerateRequest(sequence, sequence, tokens, max_new, (STOP,), temperature, stream=11))


def answer(engine: Engine, sequence: str, context: list[int], **limits: Any) -> Generated:
    ask(engine, sequence, context, **limits)
    ended: list[Generated] = []
    while not ended:
        ended = engine.step()
    return ended[0]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recording.json"
    path.write_text(json.dumps({"g0m0": [[5, 1, STOP], [6, STOP]]}))
    return path


def test_a_recording_goes_on_from_wherever_the_context_is(tmp_path: Path, recording: Path) -> None:
    engine = make(ScriptedEngine, tmp_path, file=str(recording))
    assert answer(engine, "g0m0", PROMPT).tokens.tolist() == [5, 1, STOP]
    # Another engine, that has never seen the first turn, goes on with the second.
    elsewhere = make(ScriptedEngine, tmp_path, file=str(recording))
    second = answer(elsewhere, "g0m0", [*PROMPT, 5, 1, STOP, 40, 41])
    assert second.tokens.tolist() == [6, STOP]
    assert second.finish == "stop"
    assert second.logprobs.tolist() == [0.0, 0.0]


def test_a_recording_that_has_ended_is_an_error_of_the_request(tmp_path: Path, recording: Path) -> None:
    engine = make(ScriptedEngine, tmp_path, file=str(recording))
    with pytest.raises(ValueError, match="no tokens for sequence 'g7m7'"):
        ask(engine, "g7m7", PROMPT)


def test_a_script_is_cut_at_the_limit(tmp_path: Path) -> None:
    engine = make(ScriptedEngine, tmp_path, script="child_parts:endless")
    ended = answer(engine, "a", PROMPT, max_new=7)
    assert len(ended.tokens) == 7
    assert ended.finish == "length"


def test_slow_sequences_take_ten_times_the_steps(tmp_path: Path) -> None:
    engine = make(ScriptedEngine, tmp_path, slots=400, script="child_parts:endless", slow_share=0.1, tokens_per_step=2)
    names = [f"g{number}m0" for number in range(400)]
    for name in names:
        ask(engine, name, PROMPT, max_new=20)
    ended_at = {}
    step = 0
    while engine.busy:
        step += 1
        ended_at |= {one.id: step for one in engine.step()}
    assert set(ended_at.values()) == {10, 100}
    slow = {name for name, at in ended_at.items() if at == 100}
    assert 20 <= len(slow) <= 60
    again = make(ScriptedEngine, tmp_path, slots=400, script="child_parts:endless", slow_share=0.1, tokens_per_step=20)
    for name in names:
        ask(again, name, PROMPT, max_new=20)
    assert {one.id for one in again.step()} == set(names) - slow


def test_random_tokens_are_the_counter_rng_inverted(tmp_path: Path) -> None:
    engine = make(RandomEngine, tmp_path, vocab=50)
    ended = answer(engine, "a", PROMPT, max_new=300)
    draws = uniforms(np.array([11], np.uint64), np.arange(2, 302))
    expected = np.floor(draws * 50).astype(int)
    stops = np.flatnonzero(expected == STOP)
    assert ended.tokens.tolist() == expected[: stops[0] + 1].tolist()
    assert ended.finish == "stop"
    assert ended.logprobs == pytest.approx(-np.log(50))


def test_random_tokens_are_uniform(tmp_path: Path) -> None:
    config = EngineConfig(kind="random", max_context=70_000, options={"vocab": 8})
    engine = RandomEngine(config, tokenizer_path=None, deterministic=True)
    request = GenerateRequest("a", "a", np.array([1], np.int32), 64_000, (), 1.0, stream=3)
    tokens, _ = engine.plan(request)
    counts = np.bincount(tokens, minlength=8)
    # Chi-square with 7 degrees of freedom: above 24.3 with probability 0.001 (the stream is fixed, so it never is).
    assert ((counts - 8000) ** 2 / 8000).sum() < 24.3


def test_greedy_takes_the_first_of_equals(tmp_path: Path) -> None:
    engine = make(RandomEngine, tmp_path, vocab=50)
    assert answer(engine, "a", PROMPT, temperature=0.0).tokens.tolist() == [STOP]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (ScriptedEngine, {}, "give one of 'script'"),
        (ScriptedEngine, {"script": "a:b", "file": "c"}, "give one of 'script'"),
        (ScriptedEngine, {"script": "child_parts:endles"}, "did you mean 'endless'"),
        (ScriptedEngine, {"script": "no_such_module:x"}, "cannot import 'no_such_module'"),
        (ScriptedEngine, {"file": "/nowhere.json"}, "/nowhere.json"),
        (RandomEngine, {}, "vocab"),
        (RandomEngine, {"vocab": 4, "speed": 1}, "speed"),
    ],
)
def test_wrong_options_are_named(kind: type[Engine], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(EngineConfig(kind="under test", options=options), tokenizer_path=None, deterministic=True)
