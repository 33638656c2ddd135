"""Counts from heartbeats, told once."""

from __future__ import annotations

from libra.scheduler_plugin.refusals import Refusals


def test_what_a_worker_has_counted_is_told_once_whatever_becomes_of_it() -> None:
    refusals = Refusals()
    assert refusals.new("tcp://a", {}) == {}
    assert refusals.new("tcp://a", {"layout": 2}) == {"layout": 2}
    assert refusals.new("tcp://a", {"layout": 2}) == {}
    assert refusals.new("tcp://b", {"layout": 1}) == {"layout": 1}
    assert refusals.new("tcp://a", {"layout": 5, "version": 1}) == {"layout": 3, "version": 1}
    assert refusals.new("tcp://a", {}) == {}  # another run
    assert refusals.new("tcp://a", {"version": 1}) == {"version": 1}
    refusals.forget({"tcp://b"})
    assert refusals.new("tcp://a", {"version": 1}) == {"version": 1}  # a new process at its address
    assert refusals.new("tcp://b", {"layout": 1}) == {}
