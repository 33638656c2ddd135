"""KV goes from one real vLLM engine to another through the arenas of their workers, at any TP degree, and never changes
what is sampled."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm_instance import Instance
from vllm_parts import VLLM, VOCAB, publish_model, vllm_model

from libra.resources.errors import InfraError
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Refused, Writing
from libra.resources.kv.ownership import OwnedArena
from libra.resources.kv.records import WRITING
from libra.resources.types import WeightVersion
from libra.tasks.engines import vllm_setup
from libra.tasks.engines.base import Generated

pytestmark = [*VLLM, pytest.mark.timeout(900)]
LENGTHS = (45, 77, 150)
"""None a multiple of the block size, 32."""
GAP = 1e-4
RUN = "0bad0cb1"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Instance, Instance, Path]]:
    """Instances of TP degree 1 and 2 with the same weights."""
    folder = tmp_path_factory.mktemp("weights")
    weights = publish_model(folder, 0)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(vllm_setup, "CONNECTOR_MODULE", "faulty_connector")
        yield *both(stack, "", weights), folder


def both(stack: ExitStack, name: str, weights: WeightVersion) -> tuple[Instance, Instance]:
    """Instances of TP degree 1 and 2."""
    instances = []
    for tp in (1, 2):
        instances.append(Instance(RUN, f"{name}tp{tp}", tp, weights))
        stack.callback(instances[-1].close)
    return instances[0], instances[1]


def ids(length: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"waited a minute for {what}")


def reference(version: int, context: NDArray[np.int32], tokens: NDArray[np.int32], kv_heads: int) -> Any:
    """Logprobs of the whole distribution at each of ``tokens``, by the model itself, without any KV."""
    import torch

    both = torch.from_numpy(np.concatenate([context, tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = vllm_model(version, kv_heads)(input_ids=both).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits, -1).numpy()


def assert_unchanged(version: int, context: NDArray[np.int32], ended: Generated, kv_heads: int = 2) -> None:
    """What was sampled after a move is what the model says without one."""
    expected = reference(version, context, ended.tokens, kv_heads)
    best = np.sort(expected, axis=-1)
    clear = best[:, -1] - best[:, -2] > GAP
    assert clear.sum() >= len(clear) // 2
    np.testing.assert_array_equal(ended.tokens[clear], expected.argmax(-1)[clear])
    assert np.abs(ended.logprobs - expected[np.arange(len(ended.tokens)), ended.tokens]).max() < GAP


def assert_as_one_that_stayed(context: NDArray[np.int32], moved: Generated, stayed: Generated) -> None:
    """As long as both have sampled the same, with the same logprobs; where they part, the two best are near."""
    parts = int(np.append(moved.tokens != stayed.tokens, True).argmax())
    assert np.abs(moved.logprobs[:parts] - stayed.logprobs[:parts]).max(initial=0.0) < GAP
    if parts < len(moved.tokens):
        best = np.sort(reference(0, context, moved.tokens, 2)[parts])
        assert best[-1] - best[-2] <= GAP


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
    stayed = source.run(f"{sequence}/stayed", context, 30)
    assert stayed.loaded == 0
    assert_as_one_that_stayed(context, second, stayed)


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


def test_kv_that_is_lost_before_the_ranks_have_copied_it_is_computed(pair: tuple[Instance, Instance, Path]) -> None:
    """In either direction, so with one rank and with two."""
    for source, target in (pair[:2], pair[1::-1]):
        sequence = f"lost on the way to {target.name}"
        context, first = turn(source, sequence, 105 + target.tp)
        second = target.run(sequence, context, 30, arenas=(str(source.path),))
        assert (second.loaded, second.refused) == (0, ("lost",))
        assert_unchanged(0, context, second)
        found = source.arena.find(sequence, 0, context, source.engine.kv_layout)
        assert isinstance(found, Refused)
        # And the engine goes on as before.
        context, first = turn(source, f"next on the way to {target.name}", 115 + target.tp)
        third = target.run(f"next on the way to {target.name}", context, 10, arenas=(str(source.path),))
        assert third.loaded >= 0.95 * first.staged


@pytest.mark.parametrize("field", ["block_size", "page_format"])
def test_kv_of_another_layout_is_not_loaded(pair: tuple[Instance, Instance, Path], field: str) -> None:
    target = pair[1]
    layout = target.engine.kv_layout
    assert layout is not None
    other = replace(layout, block_size=64) if field == "block_size" else replace(layout, page_format="vllm-cpu-vec512")
    context = ids(123, seed=5 + len(field))
    owned = OwnedArena(RUN, field, other, 16 * 2**20)
    try:
        assert owned.arena is not None
        writing = owned.arena.begin(field, 0, context[:100])
        assert isinstance(writing, Writing)
        assert writing.publish()
        ended = target.run(field, context, 30, arenas=(str(owned.path),))
    finally:
        owned.release()
    assert (ended.loaded, ended.refused) == (0, ("layout",))
    assert_unchanged(0, context, ended)


def test_a_copy_that_fails_costs_its_entry_and_nothing_else(pair: tuple[Instance, Instance, Path]) -> None:
    for instance in pair[:2]:
        context = ids(70, seed=11)
        before = instance.arena.stats()
        instance.run("fails", context, stage=True)
        until(lambda arena=instance.arena, before=before: arena.stats() == before, "the entry to be freed")
        ended = instance.run("works", ids(71, seed=12), stage=True)
        assert ended.refused == ("stage_failed",)
        instance.staged("works", 0, ids(71, seed=12))
        assert instance.run("none failed since", ids(72, seed=13)).refused == ()


def test_after_an_update_no_kv_of_the_old_weights_is_used(pair: tuple[Instance, Instance, Path]) -> None:
    source, target, folder = pair
    context, first = turn(source, "updated", 90)
    target.engine.load(publish_model(folder, 1))
    second = target.run("updated", context, 30, arenas=(str(source.path),), stage=True)
    assert second.cached == second.loaded == 0
    assert second.refused == ("version",)
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


def test_steps_go_on_while_kv_is_copied_and_new_weights_wait_for_it(pair: tuple[Instance, Instance, Path]) -> None:
    """With two ranks. The copy of ``held`` waits for the gate."""
    instance, folder = pair[1], pair[2]
    weights = publish_model(folder, 2)
    version = instance.arena.weight_version
    context = ids(60, seed=20)
    held = instance.run("held", context, stage=True)
    assert held.staged >= 60
    other = instance.run("beside it", ids(61, seed=21), 30)
    assert len(other.tokens) == 30
    assert instance.arena.being_written("held", version)
    loading = threading.Thread(target=instance.engine.load, args=(weights,))
    loading.start()
    try:
        loading.join(1.0)
        assert loading.is_alive()
        with Arena(instance.path) as seen:
            assert seen.being_written("held", version)
            assert seen.weight_version == version
    finally:
        (instance.path.parent / "gate").touch()
        loading.join(120.0)
    assert not loading.is_alive()
    published = dict(line.rsplit(" ", 1) for line in (instance.path.parent / "published").read_text().splitlines())
    assert [int(under) for request, under in published.items() if request.startswith("held/")] == [version]
    assert (instance.arena.weight_version, instance.arena.stats().entries, instance.arena.stats().writing) == (2, 0, 0)
    assert instance.arena.audit() == []
    assert_unchanged(2, context, instance.run("held", context, 20, stage=True))


def test_what_a_killed_engine_was_copying_is_freed_and_what_is_whole_stays(
    pair: tuple[Instance, Instance, Path],
) -> None:
    instance = pair[0]
    version, context = instance.arena.weight_version, ids(50, seed=30)
    instance.run("whole", context, stage=True)
    instance.staged("whole", version, context)
    instance.run("held for ever", ids(51, seed=31), stage=True)
    (slot,) = instance.arena.segment.in_state(WRITING)
    writers = set(instance.arena.segment.slots["writers"]["pid"][slot].tolist()) - {0}
    assert writers
    assert instance.arena.reap() == 0  # they live
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
    until(lambda: instance.arena.reap() == 1, "its writers to be dead")
    assert instance.arena.stats().writing == 0
    assert instance.arena.audit() == []
    instance.staged("whole", version, context)
    with pytest.raises(InfraError, match="vLLM is dead"):
        until(lambda: instance.engine.check() is not None, "the engine to notice")


def test_one_kv_head_goes_from_one_rank_to_two_and_back(tmp_path: Path) -> None:
    """Both ranks of the second instance hold the head, and one of them stages it."""
    weights = publish_model(tmp_path, 0, kv_heads=1)
    with ExitStack() as stack:
        one, two = both(stack, "one-head-", weights)
        context, first = turn(one, "there and back", 45)
        second = two.run("there and back", context, 30, arenas=(str(one.path),), stage=True)
        assert second.loaded >= 0.95 * first.staged
        assert_unchanged(0, context, second, kv_heads=1)
        context = np.concatenate([context, second.tokens, ids(5, seed=3)])
        two.staged("there and back", 0, context)
        third = one.run("there and back", context, 30, arenas=(str(two.path),))
        assert third.loaded > 0  # beyond what it has itself
        assert third.cached >= 0.95 * second.staged
        assert_unchanged(0, context, third, kv_heads=1)
