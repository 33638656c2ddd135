"""KV goes from one real vLLM engine to another through the arenas of their workers, at any TP degree, and never changes
what is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm_instance import Instance
from vllm_parts import VLLM, VOCAB, publish_model, vllm_model

from libra.tasks.engines.base import Generated

pytestmark = [*VLLM, pytest.mark.timeout(900)]
LENGTHS = (45, 77, 150)
"""None a multiple of the block size, 32."""
GAP = 1e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Instance, Instance, Path]]:
    """Instances of TP degree 1 and 2 with the same weights."""
    folder = tmp_path_factory.mktemp("weights")
    weights = publish_model(folder, 0)
    with ExitStack() as stack:
        instances = []
        for tp in (1, 2):
            instances.append(Instance("0badcafe", f"tp{tp}", tp, weights))
            stack.callback(instances[-1].close)
        yield instances[0], instances[1], folder


def ids(length: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def reference(version: int, context: NDArray[np.int32], tokens: NDArray[np.int32]) -> Any:
    """Logprobs of the whole distribution at each of ``tokens``, by the model itself, without any KV."""
    import torch

    both = torch.from_numpy(np.concatenate([context, tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = vllm_model(version)(input_ids=both).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits, -1).numpy()


def assert_unchanged(version: int, context: NDArray[np.int32], ended: Generated) -> None:
    """What was sampled after a move is what the model says without one."""
    expected = reference(version, context, ended.tokens)
    best = np.sort(expected, axis=-1)
    clear = best[:, -1] - best[:, -2] > GAP
    assert clear.sum() >= len(clear) // 2
    np.testing.assert_array_equal(ended.tokens[clear], expected.argmax(-1)[clear])
    assert np.abs(ended.logprobs - expected[np.arange(len(ended.tokens)), ended.tokens]).max() < GAP


def turn(instance: Instance, sequence: str, length: int) -> tuple[NDArray[np.int32], Generated]:
    """A first turn, staged; the context of the second."""
    prompt = ids(length, seed=length)
    first = instance.run(sequence, prompt, stage=True)
    context = np.concatenate([prompt, first.tokens, ids(7, seed=1)])
    assert first.staged >= length + len(first.tokens) - 1
    instance.staged(sequence, 0, context)
    return context, first


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("direction", ["1 to 2", "2 to 1"])
def test_a_move_between_degrees_saves_the_prefill_and_changes_nothing(
    pair: tuple[Instance, Instance, Path], direction: str, length: int
) -> None:
    source, target = pair[:2] if direction == "1 to 2" else (pair[1], pair[0])
    # Prompts of the other direction must not lie in the target's own cache.
    sequence, length = f"{direction}/{length}", length + 2 * (direction == "2 to 1")
    context, first = turn(source, sequence, length)
    second = target.run(sequence, context, 30, arenas=(str(source.path),))
    assert second.loaded >= 0.95 * first.staged
    assert second.cached == second.loaded
    assert_unchanged(0, context, second)


def test_staged_kv_outlives_its_engine(pair: tuple[Instance, Instance, Path]) -> None:
    source, _, folder = pair
    contexts = {f"1 to 1/{length}": turn(source, f"1 to 1/{length}", length + 4) for length in LENGTHS}
    source.engine.close()
    source.start(publish_model(folder, 0))
    for sequence, (context, first) in contexts.items():
        second = source.run(sequence, context, 30)
        assert second.loaded >= 0.95 * first.staged
        assert_unchanged(0, context, second)


def test_only_what_agrees_is_loaded(pair: tuple[Instance, Instance, Path]) -> None:
    source, target, _ = pair
    context, _ = turn(source, "differs", 101)
    other = context.copy()
    other[60] = (other[60] + 1) % VOCAB
    second = target.run("differs", other, 30, arenas=(str(source.path),))
    assert second.cached == second.loaded == 60
    assert_unchanged(0, other, second)
    # Of another sequence there is nothing, and an arena that is not there is none.
    third = target.run("absent", ids(90, seed=9), 10, arenas=(str(source.path), "/dev/shm/libra-none/arena"))
    assert third.loaded == 0


def test_after_an_update_no_kv_of_the_old_weights_is_used(pair: tuple[Instance, Instance, Path]) -> None:
    source, target, folder = pair
    context, first = turn(source, "updated", 90)
    target.engine.load(publish_model(folder, 1))
    second = target.run("updated", context, 30, arenas=(str(source.path),), stage=True)
    assert second.cached == second.loaded == 0
    assert target.engine.stats().kv_refused["version"] == 1
    assert_unchanged(1, context, second)
    # What the target staged is of the new weights, and the source, still at the old ones, does not take it.
    context = np.concatenate([context, second.tokens, ids(5, seed=2)])
    target.staged("updated", 1, context)
    third = source.run("updated", context, 10, arenas=(str(target.path),))
    assert third.loaded <= first.staged
    assert_unchanged(0, context, third)
    source.engine.load(publish_model(folder, 1))
    assert source.arena.stats().entries == 0
    fourth = source.run("updated", context, 10, arenas=(str(target.path),))
    assert fourth.loaded >= 0.95 * second.staged
    assert_unchanged(1, context, fourth)
