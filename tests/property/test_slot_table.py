"""The slot table under random admissions, growth, ends, releases and weight swaps: zones stay runs, KV stays with its
sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libra.tasks.engines.base import GenerateRequest
from libra.tasks.engines.slot_table import Resident, Running, SlotTable

SLOTS, WIDTH = 4, 24


class Slots(RuleBasedStateMachine):
    """``kv`` stands for the cache: its entry at (slot, position) is the token whose KV it would be."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = np.full((SLOTS, WIDTH), -1)
        self.table = SlotTable(SLOTS, WIDTH, self.swap)
        self.names = 0

    def swap(self, a: int, b: int, length: int) -> None:
        self.kv[[a, b], :length] = self.kv[[b, a], :length]

    @rule(name=st.integers(0, 6), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=10))
    def admit(self, name: int, tokens: list[int]) -> None:
        context = np.array(tokens, np.int32)
        request = GenerateRequest(f"r{self.names}", f"s{name}", context, 5, (), 1.0, 0)
        self.names += 1
        before = self.table.running
        there = self.table.find(f"s{name}")
        refused = there.work is not None if there is not None else before == SLOTS
        resident = self.table.admit(Running(request), reuse=True)
        assert (resident is None) == refused
        if resident is not None:
            assert resident.cached < resident.length == len(tokens)

    def running(self) -> list[Resident]:
        return self.table.decoders() + self.table.prefillers()

    @precondition(lambda self: self.table.prefillers())
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        resident = data.draw(st.sampled_from(self.table.prefillers()))
        n = data.draw(st.integers(1, resident.pending))
        self.write(resident, n)
        if not resident.pending:
            self.grow(resident)
            self.table.start_decoding(resident)

    @precondition(lambda self: any(r.length < WIDTH for r in self.table.decoders()))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        resident = data.draw(st.sampled_from([r for r in self.table.decoders() if r.length < WIDTH]))
        self.write(resident, 1)
        self.grow(resident)

    def write(self, resident: Resident, n: int) -> None:
        part = slice(resident.cached, resident.cached + n)
        self.kv[resident.slot, part] = resident.tokens[part]
        resident.cached += n

    def grow(self, resident: Resident) -> None:
        resident.tokens[resident.length] = 1
        resident.length += 1

    @precondition(lambda self: self.running())
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        self.table.finish(data.draw(st.sampled_from(self.running())), keep)

    @precondition(lambda self: any(r.work is None for r in self.table.residents()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.table.drop(data.draw(st.sampled_from([r for r in self.table.residents() if r.work is None])))

    @rule()
    def load_weights(self) -> None:
        self.table.forget_all()
        self.kv[:] = -1

    @invariant()
    def zones_are_runs(self) -> None:
        assert [r.slot for r in self.table.decoders()] == list(range(self.table.decoding))
        assert [r.slot for r in self.table.prefillers()] == list(range(self.table.decoding, self.table.running))
        assert all(r.work is not None for r in self.running())
        assert sum(r.work is not None for r in self.table.residents()) == self.table.running

    @invariant()
    def kv_stays_with_its_sequence(self) -> None:
        for resident in self.table.residents():
            np.testing.assert_array_equal(self.kv[resident.slot, : resident.cached], resident.tokens[: resident.cached])


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
