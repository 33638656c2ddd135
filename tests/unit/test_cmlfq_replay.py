"""C-MLFQ beside the baselines, on traces in virtual time. Figures are of a model of a cluster, not of one."""

import statistics

import pytest
from benchmarks.compare_policies import (
    CLUSTER,
    MEANS,
    OPTIONS,
    policies,
    race,
    recorded,
    recorded_cluster,
    synthetic,
    table,
)
from replay import Cluster, replay
from traces import Workload, drifting, scaled

from libra.scheduler_plugin.cmlfq.policy import CMlfq

SEEDS = range(5)


@pytest.fixture(scope="module")
def compared():
    return race(synthetic(SEEDS, steps=3))


def test_cmlfq_routes_better_and_moves_less_than_what_does_not_see_returns(compared):
    for other in ("least_loaded", "mlfq", "length_threshold", "embedding_like"):
        for ours, theirs in zip(compared["cmlfq"], compared[other], strict=True):
            assert ours.decision_accuracy > theirs.decision_accuracy + 0.08
            assert ours.trajectory_accuracy > theirs.trajectory_accuracy + 0.1
        assert _mean(compared["cmlfq"], "moved_share") < _mean(compared[other], "moved_share")
    assert all(outcome.decision_accuracy == 1.0 for outcome in compared["oracle"])


def test_cmlfq_is_never_slower_than_mlfq_on_the_mean_of_five_seeds(compared):
    assert _mean(compared["cmlfq"], "makespan") <= _mean(compared["mlfq"], "makespan")


@pytest.mark.parametrize(
    "counts", [(4, 2, 1, 1), (1, 1, 1, 1), (8, 2, 1, 1), (2, 1, 1, 3)], ids=["plain", "lean", "short", "long"]
)
def test_cmlfq_is_not_slower_than_mlfq_on_layouts_that_do_not_fit_the_load(counts):
    found = race(synthetic(SEEDS, steps=2), Cluster(CLUSTER.buckets, counts), ("cmlfq", "mlfq"))
    assert _mean(found["cmlfq"], "makespan") <= _mean(found["mlfq"], "makespan")


def test_cmlfq_is_not_slower_than_mlfq_when_the_last_bucket_is_full():
    full = Cluster(CLUSTER.buckets, CLUSTER.counts, slots=24)
    found = race(synthetic(SEEDS, steps=2, groups=48), full, ("cmlfq", "mlfq"))
    assert _mean(found["cmlfq"], "makespan") <= _mean(found["mlfq"], "makespan")


def test_a_memory_of_all_time_routes_worse_under_drift():
    roomy = Cluster(CLUSTER.buckets, (8, 8, 8, 8))
    right = {}
    for half_life in (256, 1e9):
        outcomes = []
        for seed in range(2):
            early = [Workload(seed).step(n, 2_500, 16, 8) for n in range(6)]
            # The policy has learned to say twice as much: the same states mean more to come than ever before.
            late = [scaled(Workload(seed).step(n, 2_500, 16, 8), 2) for n in range(6, 10)]
            policy = CMlfq({**OPTIONS, "half_life": half_life})
            outcomes.append(replay(policy, roomy, [*early, *late], skip=8))
        right[half_life] = _mean(outcomes, "decision_accuracy")
    assert right[256] > right[1e9] + 0.08


def test_recorded_trajectories_of_hop():
    found = race(recorded(SEEDS), recorded_cluster())
    assert len(found) == 6
    for other in ("least_loaded", "mlfq", "length_threshold", "embedding_like"):
        for measure in ("decision_accuracy", "trajectory_accuracy"):
            assert _mean(found["cmlfq"], measure) > _mean(found[other], measure), (other, measure)
    assert _mean(found["cmlfq"], "makespan") <= _mean(found["mlfq"], "makespan")
    assert all(outcome.decision_accuracy == 1.0 for outcome in found["oracle"])


def test_a_replay_conserves_tokens_and_repeats_itself():
    steps = drifting(Workload(3), 2, MEANS, 8, 4)
    outcomes = [replay(policies(steps)["cmlfq"](), CLUSTER, steps) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].tokens == sum(trace.final for traces in steps for trace in traces)
    assert outcomes[0].decisions == sum(len(trace.states) for traces in steps for trace in traces)


def test_the_table_names_every_policy_with_its_spread(compared):
    lines = table(compared).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(compared)
    assert all(line.count("(") == 5 for line in lines[1:])


def _mean(outcomes, name):
    return statistics.mean(getattr(outcome, name) for outcome in outcomes)
