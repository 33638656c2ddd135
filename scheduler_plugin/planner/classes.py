"""Classes of requests, told apart by what they are heavy in, and which kind of hardware suits each.

A class is a task domain, or a range of contexts of one when there are few domains. Invariant: every record is in
exactly one class; classes are ordered from decode-heavy to prefill-heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    """``prefill_share``: of the seconds that its requests would occupy an instance, alone, those of prefill. ``upto``:
    its largest context (None: all above the domain's other classes)."""

    name: str
    records: tuple[RequestRecord, ...]
    prefill_share: float
    domain: str
    upto: int | None = None


@dataclass(slots=True)
class DomainShares:
    """Prefill shares of task domains, measured while a run runs: seconds of prefill over seconds on engines, older
    steps counted ``keep`` times as much as the next."""

    keep: float = 0.8
    _prefill: dict[str, float] = field(default_factory=dict)
    _busy: dict[str, float] = field(default_factory=dict)

    def observe(self, records: Sequence[RequestRecord], step: StepCost) -> None:
        """Take in the records of a step, priced with the costs ``step``. Domains without any stay as they were."""
        for domain, members in _by_domain(records).items():
            prefill, busy = _prefill_and_busy(members, step)
            self._prefill[domain] = self._prefill.get(domain, 0.0) * self.keep + prefill
            self._busy[domain] = self._busy.get(domain, 0.0) * self.keep + busy

    @property
    def shares(self) -> dict[str, float]:
        """By domain, decode-heavy ones first."""
        found = {domain: _share(self._prefill[domain], busy) for domain, busy in self._busy.items()}
        return dict(sorted(found.items(), key=lambda item: item[1]))


def _by_domain(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    domains: dict[str, list[RequestRecord]] = {}
    for record in records:
        domains.setdefault(record.domain, []).append(record)
    return domains


def classify(
    records: Sequence[RequestRecord], step: StepCost, shares: Mapping[str, float] | None = None
) -> list[RequestClass]:
    """The classes of these records, measured with the costs ``step``; decode-heavy ones first. ``shares``: of domains,
    as measured over more than these records; they decide the order of classes that are whole domains."""
    domains = _by_domain(records)
    found = []
    for domain, members in domains.items():
        if len(domains) >= _FEW:
            share = (shares or {}).get(domain)
            share = _share(*_prefill_and_busy(members, step)) if share is None else share
            found.append(RequestClass(domain, tuple(members), share, domain))
        else:
            found += _ranges(domain, members, step)
    return sorted(found, key=lambda c: c.prefill_share)


def _ranges(domain: str, members: Sequence[RequestRecord], step: StepCost) -> Iterator[RequestClass]:
    """Runs of about as many requests, by context; requests of equal context stay together."""
    members = sorted(members, key=lambda r: r.context)
    parts = np.array_split(np.arange(len(members)), min(_RANGES, len(members)))
    bounds = sorted({members[part[-1]].context for part in parts})
    lower = -1
    for upper in bounds:
        mine = tuple(r for r in members if lower < r.context <= upper)
        lower = upper
        upto = None if upper == bounds[-1] else upper
        name = f"{domain} up to {upper} tokens"
        yield RequestClass(name, mine, _share(*_prefill_and_busy(mine, step)), domain, upto)


def _prefill_and_busy(records: Sequence[RequestRecord], step: StepCost) -> tuple[float, float]:
    """Seconds that these requests would take alone on an instance: of prefill, and in all."""
    requests = Requests.from_records(records)
    _, _, alone = request_columns(requests, step, QueueModel())
    return float(prefill_seconds(requests, step).sum()), float(alone.sum() - requests.tool_seconds.sum())


def _share(prefill: float, busy: float) -> float:
    return prefill / busy if busy > 0 else 0.0


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
