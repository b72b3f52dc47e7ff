"""Each cause by its name, ten times of ten, and no alarm for a healthy run in twenty; then on real ranks."""

import mmap
import os
import random
from math import isnan, nan
from time import sleep
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from labkit import comm
from labkit.measure.diagnose import RULES, WORTH, Finding, diagnose
from labkit.measure.diagnosis_metrics import FEWEST, last_collectives, useful, useful_step_ms
from labkit.measure.emulated_network import emulated_network
from labkit.measure.link_probe import link_times
from labkit.measure.monitor import Monitor, memory_stalls, of_messages
from labkit.measure.sinks import Records
from labkit.measure.timeline import Timeline
from labkit.run import LaunchError, launch
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant

STEPS, RANKS = 12, 4


def table(seed, own=None, data=None, message_ms=4.0, messages=1, shortest=None, scale=None, stalls=None, links=None):
    """Rows as a Monitor writes them, of ranks that wait for the slowest one; every time with 3 % of noise.

    own, data: (step, rank) -> ms. message_ms: of the network's time a step, none of it hidden.
    """
    noise = random.Random(seed)

    def about(ms):
        return ms * noise.uniform(0.97, 1.03)

    rows = []
    for step in range(1, STEPS + 1):
        fetched = [about(data(step, rank) if data else 1.0) for rank in range(RANKS)]
        computed = [about(own(step, rank) if own else 60.0) for rank in range(RANKS)]
        if step == 3:
            computed[noise.randrange(RANKS)] += 40.0  # one odd step
        arrived = max(map(sum, zip(fetched, computed, strict=True)))
        network = about(message_ms)
        for rank in range(RANKS):
            waited = arrived - fetched[rank] - computed[rank] + network
            row = {"step": step, "rank": rank, "step_ms": arrived + network, "data_ms": fetched[rank]}
            row |= {"exposed_comm_ms": waited, "network_ms": waited, "messages": messages}
            row |= {"shortest_message_ms": shortest or network, "memory_stalls": 0}
            if stalls:
                row["memory_stalls"] = stalls(step, rank)
                row["step_ms"] += 80.0 * (max(stalls(step, other) for other in range(RANKS)) > 0)
            if scale:
                row["loss_scale"] = scale(step)
            if links:
                row |= {f"to_{to}_ms": about(links(rank, to)) for to in range(RANKS) if to != rank}
            rows.append(row)
    return rows


def turns(step, rank):
    return 120.0 if (step * 7 + step // 4) % RANKS == rank else 40.0


SICK = {
    "starved input": ({"data": lambda step, rank: 40.0}, 65 / 104),
    "one slow rank": ({"own": lambda step, rank: 120.0 if rank == 2 else 60.0}, 65 / 125),
    "imbalance": ({"own": turns}, 65 / 125),
    "one slow link": (
        {"message_ms": 70.0, "links": lambda sender, to: 20.0 if (sender, to) == (1, 3) else 4.0},
        (61 + 14) / 131,
    ),
    "tiny buckets": ({"message_ms": 84.0, "messages": 28, "shortest": 3.0}, (61 + 3) / 145),
    "communication-bound": ({"message_ms": 100.0}, 111 / 161),
    "memory pressure": ({"stalls": lambda step, rank: 5 * (rank == 1 and step % 2)}, 65 / 105),
    "loss-scale thrashing": ({"scale": lambda step: 2.0 ** (16 + step % 2)}, 0.5),
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("cause", SICK)
def test_each_cause_is_named_alone_and_its_gain_predicted(cause, seed):
    given, gain = SICK[cause]
    findings = diagnose(table(seed, **given))
    assert [found.name for found in findings] == [cause]
    assert findings[0].gain == pytest.approx(gain, abs=0.06)


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_raises_no_alarm(seed):
    links = {"links": lambda sender, to: 4.0}
    assert diagnose(table(seed, scale=lambda step: 2.0**16, **links)) == []


def test_what_the_findings_say():
    def words(cause):
        return diagnose(table(0, **SICK[cause][0]))[0].evidence

    assert words("one slow rank").startswith("rank 2 computes 1") and "it waits least" in words("one slow rank")
    assert words("starved input").startswith("each rank waits ")
    one = table(0, data=lambda step, rank: 40.0 if rank == 3 else 1.0)
    assert next(found for found in diagnose(one) if found.name == "starved input").evidence.startswith("rank 3 waits")
    assert "from rank 1 to rank 3 takes " in words("one slow link")
    whole = table(0, message_ms=70.0, links=lambda sender, to: 20.0 if sender == 1 else 4.0)
    assert "from rank 1 to any other takes " in diagnose(whole)[0].evidence
    assert "28 messages" in words("tiny buckets") and "on rank 1" in words("memory pressure")


def test_the_strongest_comes_first_and_a_small_cause_is_not_named():
    both = table(0, data=lambda step, rank: 40.0, own=lambda step, rank: 160.0 if rank == 2 else 60.0)
    assert [found.name for found in diagnose(both)] == ["one slow rank", "starved input"][: len(diagnose(both))]
    assert diagnose(both)[0].name == "one slow rank"
    small = table(0, own=lambda step, rank: 70.0 if rank == 2 else 60.0)
    assert diagnose(small) == []


def test_a_rule_is_silent_where_a_column_or_steps_are_missing():
    rows = pd.DataFrame(table(0, **SICK["starved input"][0]))
    assert diagnose(rows[["step", "rank", "step_ms"]]) == []
    assert diagnose(rows[rows["step"] < FEWEST]) == []
    assert diagnose([]) == [] and diagnose(rows.drop(columns="memory_stalls"))[0].name == "starved input"


def test_a_scale_that_falls_until_it_fits_is_healthy():
    falling = table(0, scale=lambda step: 2.0 ** max(10, 16 - step))
    assert diagnose(falling) == [] and useful(pd.DataFrame(falling)) < 1


def test_steps_taken_again_count_once():
    early = [row | {"data_ms": 500.0, "step_ms": 600.0} for row in table(1)]
    assert diagnose([*early, *table(2)]) == []


def test_a_rule_of_ones_own():
    def mine(rows):
        return Finding("too many ranks", f"{rows['rank'].nunique()}", "take fewer", 1 - WORTH - 0.01)

    assert [found.name for found in diagnose(table(0), rules=[*RULES, mine])] == ["too many ranks"]
    assert diagnose(table(0), rules=[lambda rows: Finding("", "", "", 1 - WORTH + 0.01)]) == []


def test_an_unknown_gain_comes_last():
    gains = {"a": nan, "b": 0.5, "c": nan, "d": 0.2}
    rules = [lambda rows, name=name, gain=gain: Finding(name, "", "", gain) for name, gain in gains.items()]
    assert [found.name for found in diagnose(table(0), rules=rules)] == ["d", "b", "a", "c"]


def test_who_waits_for_whom():
    def last(*calls):
        group = {"group": "0", "ranks": list(range(len(calls))), "message": False, "completed": 6}
        counts = ({"scheduled": c, "awaited": c * (c > 7), "at": c, "op": op, "bytes": b} for c, op, b in calls)
        return [{"rank": rank, **group, **row} for rank, row in enumerate(counts)]

    reduce, cast = (9, "all_reduce", 4000), (8, "broadcast", 40)
    (found,) = diagnose(last(reduce, (7, "all_reduce", 8), reduce, cast))
    assert found.name == "a hang" and found.gain == 0
    assert found.evidence == (
        "rank 3 in collective 8 (broadcast of 40 bytes); ranks 0, 2 in collective 9 (all_reduce of 4,000 bytes): "
        "waiting for rank 1, last seen in collective 7 (all_reduce of 8 bytes)"
    )
    (found,) = diagnose(last((9, "all_reduce", 8), (9, "barrier", 0)))
    assert found.evidence.startswith("rank 0 is in collective 9 (all_reduce of 8 bytes); rank 1 is in")
    assert diagnose(last(reduce, reduce)) == []


# ---- on real ranks


def trained(rank, world_size, network=None, slow=None, uneven=False, starved=0.0, growth=2000, **fields):
    """Ten steps with emulated compute, as notebook 32 takes them; this rank's rows."""
    context = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
    fields = {"model": "gpt", "batch_size": 2 * world_size, "compute": "emulated"} | fields
    network = {"latency_ms": 0.5, "mbit": 400.0} | (network or {})
    rows = []
    with emulated_network(**network):
        links = link_times()
        participant = Participant(context, Experiment(block_ms=12.0 * world_size, **fields))
        if participant.trainer.scaler.is_enabled():
            participant.trainer.scaler._growth_interval = growth
        with participant.monitor([Records(lambda **row: rows.append(row))], float("nan")) as monitor:
            for step in range(10):
                most = random.Random(step).randrange(world_size) if uneven else slow
                factor = 4.0 if rank == most else 1.0
                for part in participant.model.modules():
                    if hasattr(part, "emulated_seconds"):
                        part.emulated_seconds = (0.012 * factor, 0.024 * factor)
                with monitor.step(step) as row:
                    row |= links
                    with participant.timeline.span("data"):
                        batch = participant.next_batch()
                        sleep(starved)
                    row["loss"] = participant.trainer.train_step(*batch).item()
                    if participant.trainer.scaler.is_enabled():
                        row["loss_scale"] = participant.trainer.scaler.get_scale()
    return [row | {"rank": rank} for row in rows]


ON_RANKS = {  # each far above what a busy machine adds to everything
    "starved input": {"starved": 0.15},
    "one slow rank": {"slow": 1},
    "imbalance": {"uneven": True},
    "one slow link": {"network": {"slow_rank": 2, "slower": 40.0}},
    "tiny buckets": {"network": {"latency_ms": 10.0}, "bucket_cap_mb": 0.0},
    "communication-bound": {"network": {"mbit": 6.0}},
    "loss-scale thrashing": {"growth": 1, "precision": "fp16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("cause", ON_RANKS)
def test_each_cause_is_named_on_real_ranks(ranks, cause):
    rows = [row for of_rank in ranks(RANKS, trained, **ON_RANKS[cause]) for row in of_rank]
    assert cause in [found.name for found in diagnose(rows)]


@pytest.mark.slow
def test_a_run_that_hangs_tells_who_is_missing():
    program = (
        "import time\nfor i in range(4):\n    comm.all_reduce(torch.ones(8))\n    time.sleep(60 * (rank == i == 1))"
    )
    with pytest.raises(LaunchError) as caught:
        launch(program, nproc=3, device="cpu", collective_timeout=6, quiet=True)
    (found,) = diagnose(last_collectives(caught.value.run.folder))
    assert found.evidence == (
        "ranks 0, 2 in collective 3 (all_reduce of 32 bytes): waiting for rank 1, "
        "last seen in collective 2 (all_reduce of 32 bytes)"
    )


def timed_links(rank, world_size):
    with emulated_network(1.0, 80.0, slow_rank=1, slower=10.0):
        return link_times(1 << 16)


def test_links_are_measured_from_each_rank_to_each_other(ranks):
    times = ranks(3, timed_links)
    assert [sorted(one) for one in times] == [
        sorted(f"to_{to}_ms" for to in range(3) if to != rank) for rank in range(3)
    ]
    assert all(ms >= 8.5 for one in times for ms in one.values())  # 64 KiB at 10 MB/s, and twice a latency
    assert all(ms >= 67 for ms in times[1].values())


def awaited(rank, world_size):
    """What an asynchronous all-reduce brings, and when it, and a later one, started and ended, in ms."""
    timeline = Timeline(rank)
    with emulated_network(20.0, 1000.0), comm.record(clock=timeline.clock) as events:
        tensors = [torch.full((4,), rank + 1.0) for _ in range(2)]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        (first,) = works[0].get_future().wait()
        first = first.tolist()
        works[1].wait()
    comm.all_reduce(tensors[0])  # as fast as ever: comm is as it was
    assert dist.get_world_size() == world_size and works[1].is_completed()
    return first, [(1e3 * event.start, 1e3 * event.end) for event in events[:2]], of_messages(events)


def test_messages_of_an_emulated_network_are_real_and_one_after_the_other(ranks):
    for rank, (first, times, told) in enumerate(ranks(2, awaited)):
        (start, _), (_, last) = times
        shortest = min(end - start for start, end in times)
        assert first == [3.0] * 4, f"rank {rank}"
        assert shortest >= 20 and last - start >= 40, f"rank {rank}"  # whenever the second was sent
        assert told["messages"] == 2 and told["network_ms"] >= 40, f"rank {rank}"
        assert told["shortest_message_ms"] == pytest.approx(shortest), f"rank {rank}"


def test_stalls_count_pages_of_the_disk_and_the_gpus_retries(monkeypatch):
    assert 0 <= memory_stalls(None) <= memory_stalls(torch.device("cpu"))  # so far
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 1000})
    assert memory_stalls(torch.device("cuda", 0)) >= 1000


def test_a_page_that_was_given_away_is_a_stall(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(bytes(1 << 24))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages, Monitor(Timeline()).step(1) as row:
            assert sum(pages[:: 1 << 12]) == 0
    if not row["memory_stalls"]:
        pytest.skip("this file system keeps its pages in memory")


def test_the_time_of_a_useful_step():
    rows = pd.DataFrame(table(0, scale=lambda step: 2.0 ** (16 + step % 2)))
    assert useful_step_ms(rows) == pytest.approx(2 * useful_step_ms(rows.drop(columns="loss_scale")), rel=0.1)
    with Monitor(Timeline()).step(1) as row:
        pass
    assert row["memory_stalls"] >= 0 and "messages" not in row and not isnan(row["step_ms"])
