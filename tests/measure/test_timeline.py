import json

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit import comm
from labkit.measure.timeline import Span, Timeline
from labkit.measure.timeline_analysis import exposed, overlap, subtract, union
from labkit.mesh import Mesh
from labkit.parallelize import Composed
from labkit.tensor_parallel import ColwiseParallel, RowwiseParallel


def timeline_of(*spans, rank=0):
    timeline = Timeline(rank)
    timeline.spans = [Span(name, lane, start / 1e3, end / 1e3, rank, info) for name, lane, start, end, info in spans]
    return timeline


def test_spans_are_kept_in_their_lanes_even_of_a_failing_block():
    timeline = Timeline(rank=3)
    with timeline.span("forward", micro_batch=1):
        pass
    with pytest.raises(RuntimeError), timeline.span("flush", lane="network"):
        raise RuntimeError
    forward, flush = timeline.spans
    assert (forward.name, forward.lane, forward.rank, forward.info) == ("forward", "compute", 3, {"micro_batch": 1})
    assert flush.lane == "network" and 0 <= forward.start <= forward.end <= flush.start <= flush.end


def test_intervals():
    assert union([(3, 4), (0, 1), (1, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert subtract([(0, 10)], [(2, 3), (5, 7)]) == [(0, 2), (3, 5), (7, 10)]
    assert subtract([(0, 1)], [(-1, 2)]) == [] and subtract([(0, 1)], []) == [(0, 1)]


def test_exposed_is_the_network_without_compute():
    frame = timeline_of(
        ("forward", "compute", 0, 10, {}),
        ("backward", "compute", 10, 30, {}),
        ("bucket 1", "network", 15, 25, {}),
        ("bucket 0", "network", 28, 36, {}),
        ("optimizer", "compute", 36, 40, {}),
    ).frame()
    assert exposed(frame, 0) == [(30.0, 36.0)]
    row = overlap(frame).iloc[0]
    expected = {"compute_ms": 34, "network_ms": 18, "hidden_ms": 12, "exposed_ms": 6, "total_ms": 40}
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_waiting_inside_backward_is_not_computing():
    frame = timeline_of(
        ("backward", "compute", 0, 30, {}),
        ("bucket 1", "network", 5, 20, {"waited": 0.0}),
        ("bucket 0", "network", 18, 30, {"waited": 0.010}),
    ).frame()
    row = overlap(frame).iloc[0]
    assert row["compute_ms"] == pytest.approx(20) and row["exposed_ms"] == pytest.approx(10)
    assert exposed(frame, 0) == [pytest.approx((20, 30))]


def test_ranks_merge_on_one_clock_and_survive_rows():
    one = timeline_of(("forward", "compute", 5, 9, {}), rank=0)
    two = timeline_of(("forward", "compute", 4, 9, {}), ("sum", "network", 6, 8, {"waited": 0.001}), rank=1)
    merged = Timeline.merge([one, two])
    assert [s.rank for s in merged.spans] == [1, 0, 1]
    assert merged.frame()["start_ms"].min() == 0
    assert Timeline.from_rows(merged.rows()).rows() == merged.rows()
    records = pd.DataFrame(
        [{"rank": 0, "loss": 1.0}, {"rank": 0, "spans": one.rows()}, {"rank": 1, "spans": two.rows()}]
    )
    assert Timeline.from_records(records).rows() == one.rows() + two.rows()
    with pytest.raises(ValueError, match="have no spans"):
        Timeline.from_records(records[["rank", "loss"]])


def test_empty():
    frame = Timeline().frame()
    assert frame.empty and list(frame)[:3] == ["rank", "lane", "name"] and overlap(frame).empty


def test_chrome_trace(tmp_path):
    one = timeline_of(("forward", "compute", 1000, 1002.5, {}), rank=0)
    two = timeline_of(("sum", "network", 1001, 1002, {"sent_bytes": 8}), rank=1)
    path = Timeline.merge([one, two]).chrome_trace(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    complete = {e["pid"]: e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert complete[0]["ts"] == 0 and complete[0]["dur"] == pytest.approx(2500) and complete[0]["tid"] == 0
    assert complete[1]["ts"] == pytest.approx(1000) and complete[1]["tid"] == 1
    assert complete[1]["args"] == {"sent_bytes": 8}
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names[(1, None)] == "rank 1" and names[(1, 1)] == "network" and names[(0, 0)] == "compute"
    assert all(isinstance(e["pid"], int) and e["name"] for e in trace["traceEvents"])


def test_watched_units_lie_within_forward_and_backward():
    model, timeline = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), Timeline()
    with timeline.watch(l1=model[0], l2=model[2]):
        with timeline.span("forward"):
            loss = model(torch.ones(3, 4)).sum()
        with timeline.span("backward"):
            loss.backward()
    model(torch.ones(3, 4)).sum().backward()  # no longer watched
    names = [s.name for s in sorted(timeline.spans, key=lambda s: s.start)]
    assert names == ["forward", "l1", "l2", "backward", "l2 backward", "l1 backward"]


def traced_step(rank, world_size):
    timeline = Timeline(rank)
    with comm.record() as events:
        with timeline.span("backward"):
            work = comm.all_reduce(torch.ones(10), async_op=True)
            work.wait()
        comm.broadcast(torch.ones(4))
    timeline.add_comm(events, names=["bucket 0", "weights"])
    dist.barrier()
    return timeline.rows()


def test_events_of_comm_become_network_spans(ranks):
    rows = [row for of_rank in ranks(2, traced_step) for row in of_rank]
    frame = Timeline.from_rows(rows).frame()
    network = frame[frame["lane"] == "network"]
    assert sorted(network["name"]) == ["bucket 0", "bucket 0", "weights", "weights"]
    assert set(network["sent_bytes"]) == {40.0, 8.0}
    totals = overlap(frame)
    assert (totals["exposed_ms"] > 0).all() and (totals["exposed_ms"] <= totals["network_ms"] + 1e-9).all()


def step_on_a_mesh(rank, world_size):
    """A step with data and tensor parallelism, and two messages more: (axis, operation) of each."""
    mesh, timeline = Mesh({"dp": 2, "tp": 2}), Timeline(rank)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model = Composed(module, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    corners = dist.new_group([0, 3])
    with comm.record() as events:
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()
        comm.barrier(mesh.group("dp", "tp"))
        comm.barrier(corners)
    timeline.add_comm(events, mesh=mesh)
    return [(span.info["axis"], span.info["op"]) for span in timeline.spans]


def test_a_span_tells_along_which_axis_it_was_sent(ranks):
    per_axis = {"tp": ["all_reduce", "all_reduce"], "dp": ["all_reduce"], "dp x tp": ["barrier"]}
    for rank, found in enumerate(ranks(4, step_on_a_mesh)):
        for axis, operations in per_axis.items():
            assert [op for one, op in found if one == axis] == operations, f"rank {rank}, {axis}"
        assert [op for one, op in found if one is None] == ["barrier"] * (rank in (0, 3)), f"rank {rank}"


def test_an_event_in_flight_is_refused():
    event = comm.Event("all_reduce", 2, 8, 8, "derived", 1.0)
    with pytest.raises(ValueError, match="all_reduce is still in flight"):
        Timeline().add_comm([event])
    with pytest.raises(ValueError, match="1 events but 2 names"):
        Timeline().add_comm([event], names=["a", "b"])
