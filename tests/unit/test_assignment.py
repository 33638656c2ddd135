"""Which worker takes which role."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.resources.errors import ClusterError
from libra.resources.tags import ROLES
from libra.scheduler_plugin.assignment import Candidate, assign, candidate, fill
from libra.scheduler_plugin.roles import Duty

ONE_EACH = {"rollout": 1, "tool": 1, "reward": 1, "train": 1}


def test_workers_get_the_role_that_they_say_they_may_take() -> None:
    workers = [candidate(f"{role}-0", 8, {f"capable:{role}": 8}) for role in ONE_EACH]
    assert {name: duty.role for name, duty in assign(workers, ONE_EACH, [[1, None, 1]]).duties.items()} == {
        "rollout-0": "rollout",
        "tool-0": "tool",
        "reward-0": "reward",
        "train-0": "train",
    }


def test_rollout_workers_get_the_buckets_degrees_in_the_order_of_their_names() -> None:
    workers = [candidate(f"rollout-{n}", 64, {"capable:rollout": 64}) for n in (10, 2, 1)]
    duties = assign(workers, {"rollout": 3}, [[1, 4096, 2], [4, None, 1]]).duties
    assert [duties[f"rollout-{n}"].tp for n in (1, 2, 10)] == [1, 1, 4]


def test_workers_of_a_plain_cluster_get_roles_by_name_and_the_user_is_told() -> None:
    workers = [Candidate(str(n), 2) for n in range(4)]
    assignment = assign(workers, ONE_EACH, [[1, None, 1]])
    assert assignment.duties["0"] == Duty("rollout", 1)
    assert any("0 → rollout" in note for note in assignment.notes)
    assert any("has 2 thread(s)" in note for note in assignment.notes)


def test_missing_roles_are_named_with_what_would_start_them() -> None:
    workers = [candidate("a", 8, {"capable:tool": 8}), candidate("b", 8, {"capable:tool": 8})]
    with pytest.raises(
        ClusterError,
        match=r"rollout: 1 wanted, 1 missing \(may take it: no worker\).*--nthreads 512 .*capable:rollout=512",
    ):
        assign(workers, {"rollout": 1, "tool": 1}, [[1, None, 1]])
    with pytest.raises(ClusterError, match=r"train: 1 wanted.* --nthreads 1 --resources 'capable:train=1'"):
        assign(workers, {"tool": 1, "train": 1}, [])


def test_buckets_and_roles_must_agree() -> None:
    with pytest.raises(ClusterError, match=r"buckets name 2 rollout instances but roles.rollout is 1"):
        assign([], {"rollout": 1}, [[1, None, 2]])


def test_spare_workers_take_over_what_they_may() -> None:
    spare = [candidate("a", 8, {"capable:tool": 8}), candidate("b", 8, {"capable:rollout": 8})]
    assert fill([Duty("rollout", 2), Duty("train")], spare) == {"b": Duty("rollout", 2)}


@given(st.lists(st.sets(st.sampled_from(ROLES)), min_size=1, max_size=7), st.data())
def test_roles_that_can_be_filled_are_filled(able: list[set[str]], data: st.DataObject) -> None:
    """Draw who takes what first; then there is an assignment, and one must be found."""
    workers = [Candidate(f"w{n}", 8, dict.fromkeys(roles, 8)) for n, roles in enumerate(able)]  # type: ignore[arg-type]
    wanted = [data.draw(st.sampled_from([None, *(sorted(roles) or ROLES)])) for roles in able]
    counts = {role: wanted.count(role) for role in ROLES}
    duties = assign(workers, counts, [[1, None, counts["rollout"]]]).duties
    assert {role: [d.role for d in duties.values()].count(role) for role in ROLES} == counts
    assert all(worker.may(duties[worker.name].role) for worker in workers if worker.name in duties)
