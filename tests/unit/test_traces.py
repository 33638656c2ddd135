import numpy as np
import pytest
from traces import KINDS, Trace, Turn, Workload, contexts, drifting, read, trace_of, write

from libra.resources.types import NOT_SAMPLED, ToolReturn, ToolState, Trajectory, TrajectoryId
from libra.resources.types.request import RequestRecord, decode_kvint

STATE = ToolState("get", 1, "ok")


def test_equal_seeds_give_equal_traces_and_others_others():
    assert Workload(1).step(0, 4_000, 4, 4) == Workload(1).step(0, 4_000, 4, 4)
    assert Workload(1).step(0, 4_000, 4, 4) != Workload(2).step(0, 4_000, 4, 4)


def test_lengths_drift_and_keep_to_the_limit():
    workload = Workload(0)
    steps = drifting(workload, 5, (3_000, 11_000), 32, 16)
    means = [np.mean([trace.final for trace in traces]) for traces in steps]
    assert means[-1] > 2 * means[0]
    assert max(trace.final for traces in steps for trace in traces) <= workload.limit
    longest = sorted((trace.final for trace in steps[0]), reverse=True)
    assert sum(longest[: len(longest) // 10]) > 0.25 * sum(longest)


def test_returns_tell_the_kind_and_prompts_do_not():
    traces = [trace for traces in drifting(Workload(0, lean=0.0), 2, (6_000, 6_000), 64, 8) for trace in traces]
    finals = {
        state: [t.final for t in traces if t.states and t.states[0] == state] for state in (k.states[0] for k in KINDS)
    }
    medians = [np.median(finals[kind.states[0]]) for kind in KINDS]
    assert medians == sorted(medians)
    assert medians[-1] > 10 * medians[0]


def test_what_is_written_is_read(tmp_path):
    traces = Workload(1).step(0, 4_000, 2, 2)
    write(tmp_path / "traces.json", traces)
    assert read(tmp_path / "traces.json") == traces


def test_a_finished_trajectory_becomes_a_trace():
    mask = np.array([0] * 5 + [1] * 3 + [0] * 4 + [1] * 2, np.int8)
    tokens = np.arange(14, dtype=np.int32)
    tool = ToolReturn(0, {}, tokens[8:12], STATE, 1.5, "")
    trajectory = Trajectory(
        TrajectoryId("train", 3, 1), 9, 2, {}, 5, tokens, mask, mask.astype(np.float32),
        np.where(mask == 1, 0, NOT_SAMPLED).astype(np.int32), (tool,), 2, "answer", 1.0,
    )  # fmt: skip
    trace = trace_of(trajectory)
    assert trace == Trace("p9e2m1", 5, (Turn(3, STATE, 4, 1.5), Turn(2)))
    assert trace.final == trajectory.length == 14
    assert contexts(trace) == (5, 12)


@pytest.mark.parametrize(("context", "generated"), [(0, 0), (10, 1), (100, 7)])
def test_kvint_is_the_sum_of_the_contexts(context, generated):
    assert decode_kvint(context, generated) == sum(range(context, context + generated))


def test_a_request_record_adds_up():
    from libra.resources.types import Migration, Segment, Served

    move = Migration("load", "a", "b", 8, 800, 0.1, 0.2, 0.4)

    def segment(n: int, context: int, cached: int, instance: str, queued: float) -> Served:
        ids = np.zeros(n, np.int32)
        came = move if instance == "b" else None
        return Segment(
            ids, ids.astype(np.float32), ids, "stop", context, cached, instance, 10.0, 13.0, queued, 0, came,
            2 if instance == "b" else 1,
        ).served()  # fmt: skip

    tool = ToolReturn(0, {}, np.zeros(4, np.int32), STATE, 1.5, "")
    record = RequestRecord.of("g0m0", 5, [segment(3, 5, 0, "a", 1.0), segment(2, 12, 8, "b", 0.0)], [tool], "math")
    assert (record.context, record.generated, record.tool, record.turns) == (14, 5, 4, 2)
    assert (record.kvint, record.prefilled) == (5 + 6 + 7 + 12 + 13, 5 + 4)
    assert (record.tool_seconds, record.queue_seconds, record.residence) == (1.5, 1.0, {1: 2.0, 2: 3.0})
    assert record.migrations == (move,)
