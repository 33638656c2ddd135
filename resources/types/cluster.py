"""Buckets, rollout instances and weight versions as the scheduler, the workers and the driver name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """A class of rollout instances: contexts up to ``max_context`` tokens (None: no bound) at TP degree ``tp``."""

    tp: int
    max_context: int | None


@dataclass(frozen=True, slots=True)
class RolloutInstance:
    """One engine in the routing table: its worker's ``address`` and ``name``, its bucket's ``tp``, the number of
    sequences it admits (``slots``) and the resident load in sequences and tokens."""

    address: str
    name: str
    tp: int
    slots: int
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Published weights: the directory ``path`` holds ``model.safetensors`` and its per-tensor checksums; ``digest``
    is a checksum over those, so that two versions with equal digests hold equal weights."""

    version: int
    path: str
    digest: str
