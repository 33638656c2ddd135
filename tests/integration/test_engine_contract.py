"""What every rollout engine does, whatever its kind: one suite over all of them.

To add a kind, add a `Subject`: how it is made and how its weights are published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_parts import MAX_CONTEXT, SLOTS, VLLM, VOCAB

from libra.resources.errors import WeightError
from libra.resources.rng import stream
from libra.resources.types import WeightVersion
from libra.resources.weights import publish_weights
from libra.tasks.engines.base import Engine, EngineConfig, Generated, GenerateRequest
from libra.tasks.registry import engine_class

PROMPT = np.arange(10, 20, dtype=np.int32)


@dataclass(frozen=True)
class Subject:
    """An engine kind under test. ``publish(directory, version)`` publishes weights that it can load; ``block``: KV is
    kept in whole blocks of so many tokens."""

    kind: str
    options: dict[str, Any]
    publish: Callable[[Path, int], WeightVersion]
    block: int = 1


def publish_array(directory: Path, version: int) -> WeightVersion:
    return publish_weights(directory, version, {"weights": np.full(4, float(version))}, {})


def publish_model(directory: Path, version: int) -> WeightVersion:
    # Imported here: the other kinds need no torch.
    from tiny_models import publish, tiny_model

    return publish(tiny_model("qwen3", seed=version, vocabulary=VOCAB), directory, version)


def publish_vllm_model(directory: Path, version: int) -> WeightVersion:
    from vllm_parts import publish_model

    return publish_model(directory, version)


def counting(sequence: str, context: np.ndarray, stream: int) -> np.ndarray:
    """A script without stop ids: 150 ids that follow from the context's length."""
    return (len(context) + np.arange(150)) % (VOCAB - 10) + 10


SUBJECTS = [
    Subject("scripted", {"script": "test_engine_contract:counting"}, publish_array),
    Subject("random", {"vocab": VOCAB}, publish_array),
    pytest.param(Subject("torch", {}, publish_model), marks=pytest.mark.torch),
    pytest.param(Subject("vllm", {}, publish_vllm_model, block=32), marks=VLLM),
]


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.kind)
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def bare(subject: Subject, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine without weights."""
    if subject.kind == "vllm":  # its processes take half a minute to start: one core serves all tests
        request.getfixturevalue("vllm_core")
    config = EngineConfig(kind=subject.kind, slots=SLOTS, max_context=MAX_CONTEXT, options=subject.options)
    yield engine_class(config.kind)(config, tokenizer_path=None, deterministic=False)


@pytest.fixture
def engine(bare: Engine, subject: Subject, tmp_path: Path) -> Engine:
    bare.load(subject.publish(tmp_path, 0))
    return bare


def request(name: str, tokens: np.ndarray = PROMPT, max_new: int = 8, stop: tuple[int, ...] = ()) -> GenerateRequest:
    sequence = name.split("/")[0]
    return GenerateRequest(name, sequence, tokens.astype(np.int32), max_new, stop, 1.0, stream(0, "sample", sequence))


def finish(engine: Engine, steps: int = 2000) -> dict[str, Generated]:
    """Step until nothing is left; every request must end exactly once."""
    ended: dict[str, Generated] = {}
    while engine.busy:
        for one in engine.step():
            assert one.id not in ended
            ended[one.id] = one
        steps -= 1
        assert steps > 0, "the engine does not come to an end"
    return ended


def steps(engine: Engine, count: int) -> list[Generated]:
    return [one for _ in range(count) for one in engine.step()]


def until_sampled(engine: Engine, tokens: int) -> list[Generated]:
    """Step until so many tokens have been sampled since the engine's start; what ended meanwhile."""
    ended = []
    for _ in range(2000):
        if engine.stats().sampled >= tokens:
            return ended
        ended += engine.step()
    raise AssertionError(f"not {tokens} tokens, but {engine.stats()}")


def test_a_request_without_stop_ends_at_its_length(engine: Engine) -> None:
    engine.submit(request("a", max_new=8))
    ended = finish(engine)["a"]
    assert ended.finish == "length"
    assert ended.error is None
    assert (ended.tokens.dtype, ended.logprobs.dtype, ended.versions.dtype) == (np.int32, np.float32, np.int32)
    assert ended.tokens.shape == ended.logprobs.shape == ended.versions.shape == (8,)
    assert (ended.logprobs <= 0).all()
    assert not engine.busy


def test_a_stop_id_ends_a_request_and_is_kept(engine: Engine) -> None:
    engine.submit(request("a", max_new=20))
    free = finish(engine)["a"].tokens
    stop = int(free[5])
    first = int(np.flatnonzero(free == stop)[0])
    engine.release("a")
    engine.submit(request("a", max_new=20, stop=(stop,)))
    ended = finish(engine)["a"]
    assert ended.finish == "stop"
    assert ended.tokens.tolist() == free[: first + 1].tolist()


def test_a_stop_id_at_the_length_is_a_stop(engine: Engine) -> None:
    engine.submit(request("a", max_new=20))
    free = finish(engine)["a"].tokens
    first = int(np.flatnonzero(free == free[3])[0])
    engine.release("a")
    engine.submit(request("a", max_new=first + 1, stop=(int(free[3]),)))
    assert finish(engine)["a"].finish == "stop"


def test_a_request_ends_where_the_context_is_full(engine: Engine) -> None:
    context = np.resize(PROMPT, MAX_CONTEXT - 3)
    engine.submit(request("a", context, max_new=50))
    ended = finish(engine)["a"]
    assert ended.finish == "length"
    assert len(ended.tokens) == 3


@pytest.mark.parametrize(("length", "max_new"), [(MAX_CONTEXT, 8), (MAX_CONTEXT + 5, 8), (10, 0)])
def test_a_context_without_room_is_refused(engine: Engine, length: int, max_new: int) -> None:
    with pytest.raises(ValueError, match="request a"):
        engine.submit(request("a", np.resize(PROMPT, length), max_new))
    assert not engine.busy


def test_tokens_do_not_depend_on_what_runs_beside(engine: Engine) -> None:
    engine.submit(request("a", max_new=30))
    alone = finish(engine)["a"].tokens
    engine.release("a")
    for name in "bca":
        engine.submit(request(name, max_new=30))
    assert finish(engine)["a"].tokens.tolist() == alone.tolist()


def test_more_requests_than_slots_queue_and_all_end(engine: Engine) -> None:
    names = [f"s{number}" for number in range(4 * SLOTS)]
    for name in names:
        engine.submit(request(name, max_new=6))
    engine.step()
    stats = engine.stats()
    assert stats.running == SLOTS
    assert stats.waiting == len(names) - SLOTS
    ended = finish(engine)
    assert sorted(ended) == sorted(names)
    assert set(list(ended)[:SLOTS]) == set(names[:SLOTS])
    assert all(one.queued >= 0 for one in ended.values())
    assert engine.stats().resident_sequences <= SLOTS


def test_a_sequence_that_goes_on_reuses_its_prefix(engine: Engine, subject: Subject) -> None:
    prompt = np.resize(PROMPT, 70)
    engine.submit(request("a/0", prompt))
    first = finish(engine)["a/0"]
    assert first.cached == 0
    longer = np.concatenate([prompt, first.tokens, PROMPT])
    engine.submit(request("a/1", longer))
    second = finish(engine)["a/1"]
    known = len(prompt) + len(first.tokens)
    assert known - subject.block <= second.cached <= known
    assert engine.stats().reused == second.cached


def test_another_context_of_a_sequence_reuses_only_what_agrees(engine: Engine) -> None:
    engine.submit(request("a/0"))
    finish(engine)
    other = np.concatenate([PROMPT[:4], PROMPT[::-1]])
    engine.submit(request("a/1", other))
    assert finish(engine)["a/1"].cached <= 4


def test_release_frees_the_sequence(engine: Engine) -> None:
    engine.submit(request("a"))
    finish(engine)
    assert engine.stats().resident_sequences == 1
    assert engine.stats().resident_tokens >= len(PROMPT)
    engine.release("a")
    engine.release("unknown")
    assert engine.stats().resident_sequences == 0
    assert engine.stats().resident_tokens == 0


def test_abort_keeps_the_tokens_so_far_and_frees_the_slot(engine: Engine) -> None:
    for name in ("a", "b", "c", "waits"):
        engine.submit(request(name, max_new=150))
    assert until_sampled(engine, 5 * SLOTS) == []
    engine.abort("a")
    engine.abort("unknown")
    (ended,) = [one for one in steps(engine, 2) if one.id == "a"]
    assert ended.finish == "abort"
    assert 0 < len(ended.tokens) < 150
    assert len(ended.logprobs) == len(ended.versions) == len(ended.tokens)
    stats = engine.stats()
    assert stats.waiting == 0
    assert stats.running == SLOTS
    for name in ("b", "c", "waits"):
        engine.abort(name)
    rest = finish(engine)
    assert {one.finish for one in rest.values()} == {"abort"}
    for name in ("a", "b", "c", "waits"):
        engine.release(name)
    assert engine.stats().resident_tokens == 0


def test_abort_of_a_waiting_request_ends_it_empty(engine: Engine) -> None:
    for name in ("a", "b", "c", "waits"):
        engine.submit(request(name, max_new=20))
    engine.step()
    engine.abort("waits")
    ended = finish(engine)
    assert ended["waits"].finish == "abort"
    assert len(ended["waits"].tokens) == 0
    assert {ended[name].finish for name in "abc"} == {"length"}


def test_an_id_may_be_used_again_after_an_abort(engine: Engine) -> None:
    engine.submit(request("a", max_new=50))
    engine.step()
    engine.abort("a")
    assert finish(engine)["a"].finish == "abort"
    engine.submit(request("a", max_new=5))
    assert finish(engine)["a"].finish == "length"


def test_each_token_carries_the_version_that_sampled_it(engine: Engine, subject: Subject, tmp_path: Path) -> None:
    engine.submit(request("a", max_new=150))
    assert until_sampled(engine, 6) == []
    engine.load(subject.publish(tmp_path, 1))
    ended = finish(engine)["a"]
    changes = np.flatnonzero(np.diff(ended.versions))
    assert set(ended.versions.tolist()) == {0, 1}
    assert len(changes) == 1
    assert engine.version == 1


def test_load_is_idempotent_and_drops_the_cache_once(engine: Engine, subject: Subject, tmp_path: Path) -> None:
    engine.submit(request("a"))
    finish(engine)
    engine.load(subject.publish(tmp_path, 0))
    assert engine.stats().resident_sequences == 1
    engine.load(subject.publish(tmp_path, 1))
    assert engine.stats().resident_sequences == 0
    engine.submit(request("a"))
    assert finish(engine)["a"].cached == 0


def test_damaged_weights_are_refused_and_the_old_ones_stay(engine: Engine, subject: Subject, tmp_path: Path) -> None:
    published = subject.publish(tmp_path, 1)
    file = Path(published.path) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(WeightError):
        engine.load(published)
    assert engine.version == 0
    engine.submit(request("a"))
    assert finish(engine)["a"].versions.tolist() == [0] * 8


def test_an_engine_starts_without_weights(bare: Engine) -> None:
    assert bare.version == -1
    assert not bare.busy
    assert bare.stats().resident_tokens == 0


def test_totals_add_up(engine: Engine) -> None:
    for name in "abcde":
        engine.submit(request(name, max_new=7))
    ended = finish(engine)
    stats = engine.stats()
    assert stats.sampled == sum(len(one.tokens) for one in ended.values()) == 35
    assert stats.prefilled >= 5 * len(PROMPT) - sum(one.cached for one in ended.values())
    assert stats.running == stats.waiting == 0
    assert stats.steps >= 7
