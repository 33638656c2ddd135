"""C-MLFQ under random workloads, loads and options: what holds whatever comes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.resources.tags import rollout_tag
from libra.resources.types import Bucket, RolloutInstance, ToolState
from libra.scheduler_plugin.cmlfq.persistence import dumps, merge
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.cmlfq.sketch import ACCURACY, Sketch
from libra.scheduler_plugin.cmlfq.tree import PrefixTree
from libra.scheduler_plugin.policy.base import BucketPolicy, FinishedTrajectory, PlacementRequest
from libra.scheduler_plugin.policy.embedding_like import EmbeddingLike
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.policy.length_threshold import LengthThreshold
from libra.scheduler_plugin.policy.mlfq import Mlfq

LENGTHS = st.integers(1, 2_000_000)
STATES = [ToolState(kind, size, "ok") for kind in "abc" for size in range(2)]


@given(st.lists(st.tuples(LENGTHS, st.integers(0, 300)), min_size=1, max_size=60), st.floats(1.0, 500.0))
def test_mean_and_quantiles_are_those_of_the_decayed_window(observed, half_life):
    sketch, now, seen = Sketch(), 0, []
    for length, wait in observed:
        now += wait
        sketch.add(length, now, half_life)
        seen.append((length, now))
    weights = [2.0 ** ((then - now) / half_life) for _, then in seen]
    assert sketch.evidence(now, half_life) == pytest.approx(sum(weights), rel=1e-6)
    mean = sum(w * length for w, (length, _) in zip(weights, seen, strict=True)) / sum(weights)
    assert sketch.mean() == pytest.approx(mean, rel=1e-6)
    for q in (0.1, 0.5, 0.9):
        found = sketch.quantile(q)
        # The exact quantile, allowing for weights that tie with q up to rounding and for the bins' width.
        low = _exact(seen, weights, q - 1e-6)
        high = _exact(seen, weights, q + 1e-6)
        assert low * (1 - ACCURACY) - 1e-6 <= found <= high * (1 + ACCURACY) + 1e-6


def _exact(seen, weights, q):
    reached, target = 0.0, q * sum(weights)
    for (length, _), weight in sorted(zip(seen, weights, strict=True)):
        reached += weight
        if reached >= target:
            return length
    return max(length for length, _ in seen)


@given(st.integers(0, 2**32), st.integers(2, 120), st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_the_tree_keeps_its_books_whatever_it_evicts(seed, max_nodes, trajectories):
    draw = random.Random(seed)
    tree = PrefixTree(max_nodes=max_nodes, max_depth=5, max_states=6, half_life=30.0)
    for _ in range(trajectories):
        states = draw.choices(STATES, k=draw.randrange(8))
        contexts = sorted(draw.sample(range(1, 5_000), len(states) + 1))
        tree.learn(f"p{draw.randrange(9)}", states, contexts, contexts[-1] + draw.randrange(900))
        assert len(tree) <= max_nodes
    nodes = list(tree.walk())
    assert len(nodes) == len(tree)
    assert tree.nbytes > 0
    assert tree._bins == sum(len(node.bins) for node in nodes)
    leaves = {id(node) for node in nodes if not node.children and node is not tree.everywhere}
    assert {id(node) for node in tree._leaves} == leaves
    assert all(tree._leaves[node.leaf] is node for node in tree._leaves)
    for node in nodes:
        if node.parent is not None:
            assert node.evidence(tree.now, 30.0) <= node.parent.evidence(tree.now, 30.0) * (1 + 1e-9)
    again = PrefixTree(max_nodes=max_nodes, max_depth=5, max_states=6, half_life=30.0)
    merge(again, dumps(tree))
    assert len(again) == len(tree)


class Driver:
    """A random cluster and random trajectories, loads counted as the routing table does."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        degrees = sorted(self.draw.sample([1, 2, 4, 8], self.draw.randint(1, 4)))
        bounds = sorted(self.draw.sample(range(1_000, 30_000), len(degrees)))
        self.buckets = [Bucket(tp, bound) for tp, bound in zip(degrees, bounds, strict=True)]
        self.buckets[-1] = Bucket(degrees[-1], self.draw.choice([None, 30_000]))
        self.load: dict[str, dict[str, int]] = {}
        self.degree: dict[str, int] = {}
        for n in range(self.draw.randint(1, 8)):
            address = f"tcp://n{n % 2}:{n}"
            self.load[address], self.degree[address] = {}, self.draw.choice(degrees)

    def instances(self, ready: float) -> list[RolloutInstance]:
        return [
            RolloutInstance(at, at, self.degree[at], 8, len(held), sum(held.values()))
            for at, held in self.load.items()
            if self.draw.random() < ready
        ]


def policies() -> st.SearchStrategy[BucketPolicy]:
    guess = {"intercept": 3.0, "slope": 1.0, "weights": [0.0, 1.0, -1.0]}
    return st.sampled_from(["cmlfq", "eager", "mlfq", "least_loaded", "length_threshold", "embedding_like"]).map(
        lambda kind: {
            "cmlfq": lambda: CMlfq({"max_nodes": 200, "half_life": 50}),
            "eager": lambda: CMlfq(
                {"min_evidence": 0.5, "router": {"damping": 0, "rest": 0, "gain": 0, "slack": 9, "max_moves": 99}}
            ),
            "mlfq": lambda: Mlfq({}),
            "least_loaded": lambda: LeastLoaded({}),
            "length_threshold": lambda: LengthThreshold({}),
            "embedding_like": lambda: EmbeddingLike(guess),
        }[kind]()
    )


@given(policies(), st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_every_placement_is_valid_and_holds_the_context(policy, seed):
    driver = Driver(seed)
    draw = driver.draw
    for number in range(12):
        name, context, history, current = f"g{number // 3}m{number}", draw.randint(1, 2_000), [], None
        for _ in range(draw.randrange(9)):
            if context > 30_000:
                break
            instances = driver.instances(0.9)
            ready = {instance.address: instance for instance in instances}
            if current is not None and (current not in ready or draw.random() < 0.05):
                driver.load[current].pop(name, None)
                current = None
            request = PlacementRequest(name, name.partition("m")[0], context, history, current)
            placed = policy.place(request, instances, driver.buckets)
            bucket = next(b for b in driver.buckets if rollout_tag(b.tp) == placed.tag)
            assert bucket.max_context is None or context <= bucket.max_context
            if placed.address is None:
                assert all(instance.tp != bucket.tp for instance in instances)
            else:
                assert ready[placed.address].tp == bucket.tp
                if current is not None:
                    driver.load[current].pop(name, None)
                current = placed.address
                driver.load[current][name] = context
            history.append(draw.choice(STATES))
            context += draw.randint(1, 6_000)
        if current is not None:
            driver.load[current].pop(name, None)
        policy.observe(FinishedTrajectory(name, name.partition("m")[0], context, history))
    if isinstance(policy, CMlfq):
        assert policy._trails == {}
        assert all(math.isclose(work, 0.0, abs_tol=1e-6) for work in policy._outlook.by_degree.values())


@given(st.integers(0, 2**32), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_moves_that_nothing_forces_are_at_most_those_allowed(seed, allowed):
    draw = random.Random(seed)
    buckets = [Bucket(1, 4_000), Bucket(2, 9_000), Bucket(4, None)]
    instances = [RolloutInstance(f"tcp://a:{tp}", f"r{tp}", tp, 64, 0, 0) for tp in (1, 2, 4)]
    policy = CMlfq({"min_evidence": 0.5, "router": {"max_moves": allowed, "slack": 9}})
    for number in range(40):
        context, history, current, unforced, moves = 200, [], None, 0, 0
        for _ in range(draw.randrange(1, 12)):
            request = PlacementRequest(f"g{number % 3}m{number}", f"g{number % 3}", context, history, current)
            decision = policy.decide(request, instances, buckets)
            assert decision.instance is not None
            unforced += decision.reason == "predicted"
            moves += current is not None and decision.instance.address != current
            current = decision.instance.address
            history.append(draw.choice(STATES[:2]))
            context += draw.choice((50, 400, 3_000))
        assert unforced <= allowed
        assert moves <= unforced + 2
        policy.observe(FinishedTrajectory(f"g{number % 3}m{number}", f"g{number % 3}", context, history))


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_the_same_calls_give_the_same_answers_and_the_same_tree(seed):
    def run() -> tuple[list[object], bytes]:
        draw = random.Random(seed)
        buckets = [Bucket(1, 4_000), Bucket(2, None)]
        instances = [RolloutInstance(f"tcp://a:{n}", f"r{n}", 1 + n % 2, 64, n, 100 * n) for n in range(4)]
        policy, answers = CMlfq({"max_nodes": 30}), []
        for number in range(60):
            context, history, current = 200, [], None
            for _ in range(draw.randrange(1, 6)):
                placed = policy.place(
                    PlacementRequest(f"g{number % 5}m{number}", f"g{number % 5}", context, history, current),
                    instances,
                    buckets,
                )
                answers.append(placed)
                current = placed.address
                history.append(draw.choice(STATES))
                context += draw.randrange(1, 3_000)
            policy.observe(FinishedTrajectory(f"g{number % 5}m{number}", f"g{number % 5}", context, history))
        return answers, dumps(policy.tree)

    assert run() == run()


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_paths_kept_through_learning_and_eviction_are_those_walked_anew(seed):
    draw = random.Random(seed)
    tree = PrefixTree(max_nodes=25, max_depth=6, max_states=6, half_life=20.0)
    followed = [(f"p{n % 3}", draw.choices(STATES[:3], k=6)) for n in range(4)]
    kept = [([], []) for _ in followed]
    for _ in range(60):
        states = draw.choices(STATES[:3], k=draw.randrange(7))
        tree.learn(f"p{draw.randrange(6)}", states, list(range(len(states) + 1)), 50)
        for (prompt, history), (own, everywhere) in zip(followed, kept, strict=True):
            names = tree.names(history[: draw.randrange(min(len(own), 6) or 1, 7)])
            fresh_own, fresh_everywhere = [], []
            for path, fresh, root in (
                (own, fresh_own, tree.prompts.get(prompt)),
                (everywhere, fresh_everywhere, tree.everywhere),
            ):
                del path[len(names) + 1 :]
                tree.follow(path, root, names)
                tree.follow(fresh, root, names)
                assert path == fresh
