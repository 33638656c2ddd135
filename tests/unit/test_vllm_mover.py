"""The thread that copies what a rank saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from libra.tasks.engines.vllm_mover import Mover

SECONDS = 30.0


def ended(mover: Mover[int], count: int) -> dict[str, str | None]:
    """That many ends, once they have come."""
    found: dict[str, str | None] = {}
    until = time.monotonic() + SECONDS
    while len(found) < count:
        assert time.monotonic() < until, found
        taken = mover.take()
        assert not found.keys() & taken.keys(), "an end is told once"
        found |= taken
        time.sleep(0.001)
    return found


def test_jobs_are_copied_in_order_beside_their_caller_and_told_once() -> None:
    gate, copied = threading.Event(), []

    def copy(job: int) -> None:
        assert gate.wait(SECONDS)
        copied.append((job, threading.current_thread() is threading.main_thread()))

    mover = Mover(copy)
    for job in range(3):
        mover.add(str(job), job)
    assert mover.take() == {}
    gate.set()
    assert ended(mover, 3) == {"0": None, "1": None, "2": None}
    assert copied == [(0, False), (1, False), (2, False)]
    assert mover.take() == {}
    mover.close()


def test_a_copy_that_fails_is_told_and_the_next_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def copy(job: int) -> None:
        if job == 1:
            raise OSError("no such page")

    mover = Mover(copy)
    for job in range(3):
        mover.add(str(job), job)
    assert ended(mover, 3) == {"0": None, "1": "OSError: no such page", "2": None}
    assert "no such page" in caplog.text
    mover.close()


def test_a_thread_that_cannot_begin_fails_every_job() -> None:
    def begin() -> None:
        raise RuntimeError("no device")

    mover: Mover[int] = Mover(lambda job: None, begin)
    mover.add("0", 0)
    assert ended(mover, 1) == {"0": "RuntimeError: no device"}
    mover.close()


@pytest.mark.parametrize("others", [0, 5])
def test_closing_ends_the_thread_after_the_copy_that_it_is_at(others: int) -> None:
    begun, gate, copied = threading.Event(), threading.Event(), []

    def copy(job: int) -> None:
        begun.set()
        assert gate.wait(SECONDS)
        copied.append(job)

    before = set(threading.enumerate())
    mover = Mover(copy)
    for job in range(1 + others):
        mover.add(str(job), job)
    assert begun.wait(SECONDS)
    closing = threading.Thread(target=closed(mover))
    closing.start()
    while not mover._closing:
        time.sleep(0.001)
    gate.set()
    closing.join(SECONDS)
    assert copied == [0]
    assert set(threading.enumerate()) == before


def closed(mover: Mover[int]) -> Callable[[], None]:
    return mover.close
