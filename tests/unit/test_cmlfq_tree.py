import pytest

from libra.resources.types import ToolState
from libra.scheduler_plugin.cmlfq.estimate import Estimate, Estimator
from libra.scheduler_plugin.cmlfq.tree import OTHER, Node, PrefixTree

OK = ToolState("test", 1, "ok")
FAILED = ToolState("test", 1, "failure")


def make_tree(**changes: float) -> PrefixTree:
    options = {"max_nodes": 1_000, "max_depth": 16, "max_states": 32, "half_life": 1_000.0} | changes
    return PrefixTree(
        max_nodes=int(options["max_nodes"]),
        max_depth=int(options["max_depth"]),
        max_states=int(options["max_states"]),
        half_life=options["half_life"],
    )


def ask(
    tree: PrefixTree, prompt: str, states: list[ToolState], contexts: list[int | None], **options: float
) -> Estimate | None:
    own: list[Node] = []
    everywhere: list[Node] = []
    names = tree.names(states)
    tree.follow(own, tree.prompts.get(prompt), names)
    tree.follow(everywhere, tree.everywhere, names)
    asked = {"min_evidence": 4.0, "shrinkage": 8.0} | options
    return Estimator(tree, **asked).estimate(own, everywhere, contexts)


def teach(tree: PrefixTree, prompt: str, states: list[ToolState], contexts: list[int], final: int, times: int) -> None:
    for _ in range(times):
        tree.learn(prompt, states, contexts, final)


def test_a_return_tells_what_the_prompt_cannot():
    tree = make_tree()
    teach(tree, "p", [OK], [100, 300], 500, times=10)
    teach(tree, "p", [FAILED], [100, 300], 8_300, times=10)
    short, long = ask(tree, "p", [OK], [100, 300]), ask(tree, "p", [FAILED], [100, 300])
    assert short is not None and long is not None
    assert (round(short.mean), round(long.mean)) == (500, 8_300)
    # The same states in a longer context end later by as much: what is learned is what remains.
    later = ask(tree, "p", [FAILED], [900, 1_100])
    assert later is not None and round(later.mean) == 9_100


def test_a_seen_prompt_with_a_shallow_tree_does_not_hide_deeper_global_evidence():
    tree = make_tree()
    teach(tree, "seen", [OK], [100, 300], 400, times=20)
    teach(tree, "other", [OK, FAILED, FAILED], [100, 300, 900, 1_500], 21_500, times=20)
    found = ask(tree, "seen", [OK, FAILED, FAILED], [100, 300, 900, 1_500])
    assert found is not None
    assert (found.source, found.depth, round(found.mean)) == ("global", 3, 21_500)


def test_at_equal_depth_the_own_tree_weighs_by_its_evidence():
    means = []
    for own in (4, 8, 72):
        tree = make_tree(half_life=1e9)
        teach(tree, "all", [OK], [0, 0], 1_000, times=4_000)
        teach(tree, "own", [OK], [0, 0], 9_000, times=own)
        found = ask(tree, "own", [OK], [0, 0], min_evidence=2.0)
        assert found is not None and found.source == "both"
        means.append(found.mean)
    # Weights 1/3, 1/2 and 9/10 of the own 9,000, the rest of all prompts' mean.
    assert means == pytest.approx([3_670, 5_000, 8_200], rel=0.01)


def test_too_little_evidence_falls_back_to_the_ancestor_and_its_context():
    tree = make_tree()
    teach(tree, "p", [OK], [100, 300], 5_300, times=8)
    teach(tree, "p", [OK, FAILED], [100, 300, 2_300], 9_300, times=1)
    found = ask(tree, "p", [OK, FAILED], [100, 300, 2_300])
    assert found is not None and found.depth == 1
    # From 300 tokens on there were 5,000 or 9,000 left, then: not from 2,300 on.
    assert found.mean == pytest.approx(300 + (8 * 5_000 + 9_000) / 9, rel=0.03)


def test_an_ancestor_speaks_only_of_lengths_not_outgrown():
    tree = make_tree()
    teach(tree, "p", [OK], [100, 300], 500, times=50)
    teach(tree, "p", [OK], [100, 300], 20_300, times=10)
    found = ask(tree, "p", [OK, FAILED], [100, 300, 3_000])
    assert found is not None and found.depth == 1
    assert found.mean == pytest.approx(20_300, rel=0.03)
    assert found.evidence == pytest.approx(10, rel=0.15)


def test_no_evidence_no_estimate():
    tree = make_tree()
    assert ask(tree, "p", [OK], [100, 300]) is None
    teach(tree, "p", [OK], [100, 300], 500, times=3)
    assert ask(tree, "p", [OK], [100, 300]) is None
    assert ask(tree, "p", [OK], [100, 300], min_evidence=2.0) is not None


def test_drift_is_followed_where_the_mean_of_all_time_would_be_wrong():
    tree = make_tree(half_life=100)
    contexts = [100, 300]
    teach(tree, "p", [OK], contexts, 1_300, times=1_000)
    teach(tree, "p", [OK], contexts, 9_300, times=500)
    found = ask(tree, "p", [OK], contexts)
    assert found is not None
    all_time = (1_000 * 1_300 + 500 * 9_300) / 1_500
    assert all_time < 4_000
    assert found.mean == pytest.approx(9_300, rel=0.05)
    assert found.p90 == pytest.approx(9_300, rel=0.05)
    # Both are of the same window: a P90 over all time would have stayed short while the mean rose, or the reverse.
    teach(tree, "p", [OK], contexts, 1_300, times=400)
    back = ask(tree, "p", [OK], contexts)
    assert back is not None
    assert back.mean == pytest.approx(1_300 + 8_000 / 2**4, rel=0.1)
    assert back.p90 == pytest.approx(1_300, rel=0.05)


def test_contexts_nobody_knows_teach_nothing_and_do_not_mislead():
    tree = make_tree()
    for _ in range(5):
        tree.learn("p", [OK, FAILED], [100, None, 900], 2_000)
    assert len(tree) == 2  # The two roots alone: nothing after the gap.
    assert ask(tree, "p", [OK, FAILED], [None, None, 900]) is None


def test_the_cap_holds_and_the_useful_stays():
    tree = make_tree(max_nodes=300)
    loved = [OK, FAILED, OK]
    teach(tree, "loved", loved, [1, 2, 3, 4], 500, times=50)
    for number in range(2_000):
        tree.learn(f"once{number}", [OK, ToolState("other", number % 20, "ok")], [1, 2, 3], 900)
        assert len(tree) <= 300
        if number % 100 == 0:
            teach(tree, "loved", loved, [1, 2, 3, 4], 500, times=5)
    assert tree.evicted > 1_000
    found = ask(tree, "loved", loved, [1, 2, 3, 4])
    assert found is not None and found.depth == 3
    assert sum(1 for _ in tree.walk()) == len(tree)


def test_states_beyond_the_cap_count_as_one():
    tree = make_tree(max_states=4)
    for size in range(10):
        tree.learn("p", [ToolState("tool", size, "ok")], [0, 10], 100)
    assert tree.names([ToolState("tool", 0, "ok"), ToolState("tool", 7, "ok"), ToolState("new", 0, "ok")]) == [1, 0, 0]
    assert OTHER in (tree.everywhere.children or {})


def test_reported_bytes_are_those_taken():
    import tracemalloc

    states = [ToolState("tool", size, "ok") for size in range(12)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree = make_tree(max_nodes=20_000)
    number = 0
    while len(tree) < 20_000 - 60:
        path = [states[(number * 7 + step * (number % 5 + 1)) % 12] for step in range(12)]
        tree.learn(f"g{number // 4}", path, list(range(0, 1_300, 100)), 1_300 + 37 * (number % 90))
        number += 1
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert tree.nbytes == pytest.approx(taken, rel=0.25)
