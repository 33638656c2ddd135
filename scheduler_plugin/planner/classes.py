"""Classes of requests, told apart by what they are heavy in, and which kind of hardware suits each.

A class is a task domain, or a range of contexts of one when there are few domains. Invariant: every record is in
exactly one class; classes are ordered from decode-heavy to prefill-heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from libra.resources.cost_model import Requests, StepCost
from libra.resources.cost_model.rollout import QueueModel, request_columns
from libra.resources.specs import HardwareSpec
from libra.resources.types import RequestRecord

_FEW = 3
"""Below so many domains, each is divided by context."""
_RANGES = 4


@dataclass(frozen=True, slots=True)
class RequestClass:
    """``prefill_share``: of the seconds that its requests would occupy an instance, alone, those of prefill."""

    name: str
    records: tuple[RequestRecord, ...]
    prefill_share: float


def classify(records: Sequence[RequestRecord], step: StepCost) -> list[RequestClass]:
    """The classes of these records, measured with the costs ``step``; decode-heavy ones first."""
    domains: dict[str, list[RequestRecord]] = {}
    for record in records:
        domains.setdefault(record.domain, []).append(record)
    groups: dict[str, list[RequestRecord]] = {}
    for domain, members in domains.items():
        if len(domains) >= _FEW:
            groups[domain] = members
            continue
        members = sorted(members, key=lambda r: r.context)
        for part in np.array_split(np.arange(len(members)), min(_RANGES, len(members))):
            groups[f"{domain} up to {members[part[-1]].context} tokens"] = [members[i] for i in part]
    found = [RequestClass(name, tuple(rs), _prefill_share(rs, step)) for name, rs in groups.items()]
    return sorted(found, key=lambda c: c.prefill_share)


def _prefill_share(records: Sequence[RequestRecord], step: StepCost) -> float:
    requests = Requests.from_records(records)
    prefill = prefill_seconds(requests, step)
    _, path, alone = request_columns(requests, step, QueueModel())
    busy = alone.sum() - requests.tool_seconds.sum()
    del path
    return float(prefill.sum() / busy) if busy > 0 else 0.0


def prefill_seconds(requests: Requests, step: StepCost) -> np.ndarray:
    """Seconds of all prefills of each request, shape (N,)."""
    return np.asarray(
        step.admission * requests.turns
        + step.prefill_token * requests.prefill_tokens
        + step.prefill_pair * requests.prefill_pairs
    )


def assignments(classes: Sequence[RequestClass], kinds: Sequence[HardwareSpec]) -> Iterator[dict[str, list[int]]]:
    """Ways to give classes to kinds: the kinds from bandwidth-rich to compute-rich take runs of the classes from
    decode-heavy to prefill-heavy. A kind may get none."""
    order = sorted(kinds, key=lambda k: -k.hbm / k.flops)
    for cuts in combinations_with_replacement(range(len(classes) + 1), len(order) - 1):
        bounds = [0, *cuts, len(classes)]
        yield {kind.name: list(range(bounds[i], bounds[i + 1])) for i, kind in enumerate(order)}
