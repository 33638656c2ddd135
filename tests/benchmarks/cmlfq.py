"""C-MLFQ's decisions a second, in one core, with a full tree. Process CPU time, medians."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence

from benchmarks.rows import Row, Rows
from libra.resources.types import Bucket, RolloutInstance, ToolState
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.policy.base import FinishedTrajectory, PlacementRequest
from libra.scheduler_plugin.routing import RoutingTable

NODES = 100_000
DEPTH = 20
INSTANCES = 64
WANTED = 15_000.0
BUCKETS = (Bucket(1, 4_000), Bucket(2, 12_000), Bucket(4, 24_000), Bucket(8, None))
_STATES = [ToolState(kind, size, "ok") for kind in ("view", "edit", "bash", "test") for size in range(3)]


def run(rounds: int = 7, decisions: int = 1_000) -> Rows:
    """Rows for the table of benchmarks."""
    policy, requests = _full()
    instances = [
        RolloutInstance(f"tcp://node{n // 4}:{n}", f"r{n}", BUCKETS[n % 4].tp, 256, 64, 300_000 + n) for n in range(8)
    ]
    # A trajectory comes to its last return but one, then to its last: as it goes, each decision sees one return more.
    asked = [
        PlacementRequest(
            request.trajectory,
            request.prompt,
            request.context - 300 * back,
            request.history[: DEPTH - back],
            at.address,
        )
        for request, at in zip(requests[: decisions // 2], itertools.cycle(instances))
        for back in (1, 0)
    ]
    rates = []
    for _ in range(rounds):
        began = time.process_time()
        for request in asked:
            policy.place(request, instances, BUCKETS)
        rates.append(len(asked) / (time.process_time() - began))
    rate = statistics.median(rates)
    by_table = statistics.median(_through_table(policy, requests[: decisions // 2]) for _ in range(rounds))
    learned = _learning(policy)
    return {
        "cmlfq.decisions_per_s": Row(rate, "1/s", WANTED),
        "cmlfq.table_decisions_per_s": Row(by_table, "1/s", None, f"by the routing table, {INSTANCES} instances"),
        "cmlfq.learned_per_s": Row(learned, "1/s"),
        "cmlfq.bytes_per_node": Row(policy.tree.nbytes / len(policy.tree), "B"),
    }


def _through_table(policy: CMlfq, requests: Sequence[PlacementRequest]) -> float:
    """Placements a second through a routing table, at the last two returns of ``requests``, with their bookkeeping."""
    table = RoutingTable(policy, BUCKETS)
    for n in range(INSTANCES):
        table.offer(f"tcp://node{n // 4}:{n}", f"r{n}", BUCKETS[n % 4].tp, 256)
    for request in requests:
        table.open(request.trajectory, request.prompt, request.context, 0)
        for turn, state in enumerate(request.history[: DEPTH - 2]):
            table.returned(request.trajectory, turn, state, request.context - 300 * (DEPTH - turn - 1))
        table.place(request.trajectory)
    began = time.process_time()
    for request in requests:
        for turn in (DEPTH - 2, DEPTH - 1):
            context = request.context - 300 * (DEPTH - turn - 1)
            table.returned(request.trajectory, turn, request.history[turn], context)
            table.place(request.trajectory)
    return 2 * len(requests) / (time.process_time() - began)


def _full() -> tuple[CMlfq, list[PlacementRequest]]:
    """A policy whose tree holds `NODES` nodes, and requests at the `DEPTH`-th return of known paths."""
    policy = CMlfq({"max_nodes": NODES, "min_evidence": 2.0, "half_life": 100_000})
    requests: list[PlacementRequest] = []
    number = 0
    while len(policy.tree) < NODES:
        requests.extend(_group(policy, number))
        number += 1
    return policy, requests


def _group(policy: CMlfq, number: int) -> list[PlacementRequest]:
    """Eight members of a prompt that share most of two paths; all but two of them finish."""
    draw = random.Random(number)
    paths = [[draw.choice(_STATES) for _ in range(DEPTH)] for _ in range(2)]
    found = []
    for member in range(8):
        name, history, context = f"g{number}m{member}", paths[member % 2], 500
        grows = draw.choice((100, 300, 900))
        for returns in range(DEPTH + 1):
            request = PlacementRequest(name, name.partition("m")[0], context, history[:returns], None)
            policy.place(request, (), BUCKETS)
            context += grows
        if member < 6:
            policy.observe(FinishedTrajectory(name, name.partition("m")[0], context, history))
        else:
            found.append(request)
    return found


def _learning(policy: CMlfq) -> float:
    """Trajectories learned a second, at `DEPTH`, by a tree that has to evict for each."""
    paths = [[random.Random(n).choice(_STATES) for _ in range(DEPTH)] for n in range(200)]
    contexts = list(range(500, 500 + 300 * (DEPTH + 1), 300))
    began = time.process_time()
    for number, path in enumerate(paths):
        policy.tree.learn(f"new{number}", path, contexts, contexts[-1] + 250)
    return len(paths) / (time.process_time() - began)
