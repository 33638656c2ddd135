"""Buckets, rollout instances and weight versions as the scheduler, the workers and the driver name them."""

from __future__ import annotations

from dataclasses import dataclass

from libra.resources.types.kv import KVRoom


@dataclass(frozen=True, slots=True)
class Bucket:
    """A class of rollout instances: contexts up to ``max_context`` tokens (None: no bound) at TP degree ``tp``."""

    tp: int
    max_context: int | None


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What a rollout instance has told as it became ready: the ``node`` that it is on (`libra.resources.tags.node_of`;
    empty: nobody said) and what its KV cache holds."""

    node: str = ""
    kv: KVRoom | None = None


NO_FACTS = InstanceFacts()


@dataclass(frozen=True, slots=True)
class RolloutInstance:
    """One engine in the routing table: its worker's ``address`` and ``name``, its bucket's ``tp``, the number of
    sequences it admits (``slots``), the resident load in sequences and tokens, and its ``facts`` (the same object for
    as long as it is ready)."""

    address: str
    name: str
    tp: int
    slots: int
    sequences: int
    tokens: int
    facts: InstanceFacts = NO_FACTS


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Published weights: the directory ``path`` holds ``model.safetensors`` and its per-tensor checksums; ``digest``
    is a checksum over those, so that two versions with equal digests hold equal weights."""

    version: int
    path: str
    digest: str
