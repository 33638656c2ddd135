"""Does a move pay? What moving a KV cache takes, and what a sequence costs where it decodes.

A move to another instance of the same node loads the staged KV from host memory; to another node it takes the cheaper
of fetching the shards over the network (then loading them) and prefilling again. Decoding follows
``t_step = a + b·B + c·S`` (B running sequences, S resident tokens: weights, per-sequence work and KV reads of a
memory-bound step), so an instance needs about ``a·max steps + Σ (a/slots + b + c·context) + prefill`` for all
it has.

Bytes a token, room and node of an instance are what it has told (`libra.resources.types.InstanceFacts`), unless
options say otherwise. A rate that no option gives is assumed until a move has measured it: bandwidths so low that a
move must promise much, and is not made for little.

Invariants: estimates depend on what was configured and told alone; they never fall with the number of tokens; a rate
that was only assumed gives way to the first measurement, others follow what was measured, recent measurements weighing
more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import Field

from libra.resources.config import Bytes, Config, Seconds
from libra.resources.types import InstanceFacts, RolloutInstance
from libra.scheduler_plugin.policy.moves import MoveEstimate, MoveOutcome

_T = TypeVar("_T")

KV_BYTES = 163_840
"""Bytes of KV a token, where nobody knows: of a 14B model with 40 KV-carrying layers in bfloat16."""


class CostConfig(Config):
    """What moves and decoding cost on this hardware with this model, until measured.

    The defaults of bandwidths are *assumed*, low on purpose; those of ``prefill_rate`` and ``decode`` are *derived*
    (not measured) for a 14B model with 40 KV-carrying layers on A800-class devices.
    """

    kv_bytes_per_token: Bytes | None = Field(default=None, gt=0)
    """Bytes of KV a token of context takes, over all ranks. None: what the instances say, `KV_BYTES` if they do not."""
    host_bandwidth: Bytes = Field(default=1_000_000_000, gt=0)
    """Bytes a second from an instance's host arena to another instance of the node."""
    network_bandwidth: Bytes = Field(default=100_000_000, gt=0)
    """Bytes a second between the host arenas of two nodes."""
    move_latency: Seconds = Field(default=0.01, ge=0)
    """Time of a fetch of nothing."""
    prefill_rate: dict[int, float] = Field(default={1: 3_700.0, 2: 7_300.0, 4: 13_800.0, 8: 25_000.0}, min_length=1)
    """Tokens a second that an instance of the TP degree prefills."""
    decode: dict[int, tuple[float, float, float]] = Field(
        default={
            1: (22.46e-3, 20.0e-6, 102.4e-9),
            2: (14.19e-3, 24.1e-6, 51.2e-9),
            4: (10.54e-3, 26.1e-6, 25.6e-9),
            8: (9.19e-3, 27.2e-6, 12.8e-9),
        },
        min_length=1,
    )
    """Seconds of a decode step by TP degree: (a, b a sequence, c a resident token)."""
    kv_tokens: dict[int, int] = Field(default={})
    """Tokens of KV that an instance of the TP degree holds; of a degree that is not named, what its instances say."""
    nodes: dict[str, str] = Field(default={})
    """Node of an instance by its address; others are where they say, or on the host that their address names."""
    generated_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the remaining context that is generated (the rest comes from tools)."""
    memory: float = Field(default=0.05, gt=0, le=1)
    """Weight of one measured move in the rate that follows it."""


class CostModel:
    """Estimates, corrected by what was measured."""

    def __init__(self, config: CostConfig) -> None:
        self.config = config
        self.host_bandwidth = float(config.host_bandwidth)
        self.network_bandwidth = float(config.network_bandwidth)
        self.prefill_rate = dict(config.prefill_rate)
        self.kv_bytes_per_token = config.kv_bytes_per_token or KV_BYTES
        self.kv_tokens = dict(config.kv_tokens)
        self._assumed = {"host_bandwidth", "network_bandwidth", "prefill_rate"} - config.model_fields_set
        self._nodes = dict(config.nodes)
        self._facts: dict[str, InstanceFacts] = {}
        self._work: dict[int, tuple[float, float]] = {}
        self._slots: dict[int, int] = {}

    def see(self, instances: Sequence[RolloutInstance]) -> None:
        """Note how many sequences the instances of a TP degree admit, and what else they have told."""
        slots, facts = self._slots, self._facts
        told = len(instances) != len(facts)
        for instance in instances:
            if slots.get(instance.tp) != instance.slots:
                slots[instance.tp] = instance.slots
                self._work.clear()
            told = told or facts.get(instance.address) is not instance.facts
        if told:
            self._learn_facts(instances)

    def _learn_facts(self, instances: Sequence[RolloutInstance]) -> None:
        """Take over what these instances say: of a TP degree, the room of the smallest. Where one was that has gone
        stays known, for its KV may still lie there."""
        self._facts = {instance.address: instance.facts for instance in instances}
        self.kv_tokens = {}
        for instance in instances:
            node, room = instance.facts.node, instance.facts.kv
            if node:
                self._nodes[instance.address] = node
            if room is None:
                continue
            self.kv_tokens[instance.tp] = min(room.tokens, self.kv_tokens.get(instance.tp, room.tokens))
            if room.bytes_per_token and self.config.kv_bytes_per_token is None:
                self.kv_bytes_per_token = room.bytes_per_token
        self.kv_tokens |= self.config.kv_tokens
        self._nodes |= self.config.nodes

    def node(self, address: str) -> str:
        """The node an instance is on."""
        found = self._nodes.get(address)
        if found is None:
            found = self._nodes[address] = address.rpartition("://")[2].rpartition(":")[0]
        return found

    def move(self, tokens: int, source: str | None, target: RolloutInstance) -> MoveEstimate:
        """What it takes until ``target`` holds ``tokens`` of KV that are at ``source`` (an address; None: nowhere)."""
        prefill = tokens / _of_degree(self.prefill_rate, target.tp)
        if source is None:
            return MoveEstimate("prefill", prefill, tokens, None, prefill)
        if source == target.address:
            return MoveEstimate("hit", 0.0, tokens, None, None)
        size = tokens * self.kv_bytes_per_token
        load = size / self.host_bandwidth
        if self.node(source) == self.node(target.address):
            return MoveEstimate("load", load, tokens, load, prefill)
        fetch = self.config.move_latency + size / self.network_bandwidth + load
        if fetch <= prefill:
            return MoveEstimate("fetch", fetch, tokens, fetch, prefill)
        return MoveEstimate("prefill", prefill, tokens, fetch, prefill)

    def measured(self, outcome: MoveOutcome) -> None:
        """Let the rates follow a move that happened. Moves of no tokens or no time say nothing of a rate."""
        if outcome.tokens <= 0 or outcome.seconds <= 0.0:
            return
        size = outcome.tokens * self.kv_bytes_per_token
        if outcome.way == "load":
            self.host_bandwidth = self._follow("host_bandwidth", self.host_bandwidth, size, outcome.seconds)
        elif outcome.way == "fetch":
            wire = outcome.seconds - self.config.move_latency
            if "host_bandwidth" not in self._assumed:
                wire -= size / self.host_bandwidth
            if wire > 0.0:
                self.network_bandwidth = self._follow("network_bandwidth", self.network_bandwidth, size, wire)
        elif outcome.way == "prefill":
            rate, assumed = _of_degree(self.prefill_rate, outcome.tp), "prefill_rate" in self._assumed
            measured = self._follow("prefill_rate", rate, outcome.tokens, outcome.seconds)
            if assumed:  # the other degrees keep their proportions to this one
                self.prefill_rate = {tp: other * measured / rate for tp, other in self.prefill_rate.items()}
            self.prefill_rate[outcome.tp] = measured
            self._work.clear()

    def work_seconds(self, tp: int, start: float, end: float) -> float:
        """Seconds that a full instance of degree ``tp`` spends on a sequence's growth from ``start`` to ``end`` tokens:
        its share of the decode steps (their fixed time is shared by as many as have a slot) and the prefill of its
        tools' payloads."""
        linear, quadratic = self.work_rates(tp)
        return linear * (end - start) + quadratic * (end * end - start * start)

    def work_rates(self, tp: int) -> tuple[float, float]:
        """What `work_seconds` takes a token, and a token² (its squares' difference)."""
        found = self._work.get(tp)
        if found is None:
            a, b, c = _of_degree(self.config.decode, tp)
            share = self.config.generated_share
            linear = share * (a / max(1, self._slots.get(tp, 1)) + b) + (1.0 - share) / _of_degree(
                self.prefill_rate, tp
            )
            found = self._work[tp] = linear, share * c / 2
        return found

    def step_seconds(self, tp: int, grows: float) -> float:
        """Seconds that growing by ``grows`` tokens takes on an idle instance, before the context is read: what no other
        sequence shares with it."""
        return _of_degree(self.config.decode, tp)[0] * grows * self.config.generated_share

    def holds(self, tp: int, tokens: float) -> bool:
        """Whether an instance of degree ``tp`` has room for a sequence of ``tokens``."""
        room = self.kv_tokens.get(tp)
        return room is None or tokens <= room

    def _follow(self, name: str, rate: float, amount: float, seconds: float) -> float:
        if name in self._assumed:
            self._assumed.discard(name)
            return amount / seconds
        # The harmonic mean: what adds up over moves is time.
        share = self.config.memory
        return 1.0 / ((1.0 - share) / rate + share * seconds / amount)


def _of_degree(table: Mapping[int, _T], tp: int) -> _T:
    """The entry for ``tp``, else that of the nearest degree below it, else the lowest."""
    found = table.get(tp)
    if found is None:
        found = table[max((degree for degree in table if degree <= tp), default=min(table))]
    return found
