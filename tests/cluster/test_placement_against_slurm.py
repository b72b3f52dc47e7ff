"""Real Slurm is the oracle of the simulated queue: the same jobs on the same nodes, one decision after the other.

Jobs on Slurm last until this test ends them, in the order in which they end in the simulation. So both decide from the
same history, however slow the machine is. Which of two equal leaves a job gets is nobody's rule, so the leaves are
compared from what Slurm had free.
"""

import random
import re

import pytest
from slurm_jobs import start_or_skip, wait_for

from labkit.cluster.job_queue import run_queue
from labkit.cluster.job_trace import Gang
from labkit.cluster.placement import Inventory, Topology, best_fit_by_leaf

TOPOLOGY = Topology(16, leaf=4, gpus_per_node=1)
HOUR = 3600


@pytest.fixture
def slurm():
    """16 nodes on 4 leaves; skips, with the reason, where no Slurm can run in namespaces."""
    with start_or_skip(nodes=16, cpus=1, gpus=0, leaf=4) as running:
        yield running


def in_order_only(slurm):
    """Make the queue first in, first out: backfill may look at the head only."""
    file = slurm.folder / "slurm.conf"
    file.write_text(file.read_text().replace("bf_interval=1", "bf_interval=1,bf_max_job_test=1"))
    slurm.run(["scontrol", "reconfigure"])


def submit(slurm, gangs):
    """{number of a gang: Slurm's job number}; whole nodes, for as long as nobody ends them."""
    jobs = {}
    for gang in gangs:
        options = [f"--nodes={gang.gpus}", "--exclusive", f"--time={int(gang.limit // 60)}", "--output=/dev/null"]
        jobs[gang.number] = slurm.run(["sbatch", "--parsable", *options, "--wrap=exec sleep 9999"]).stdout.strip()
    return jobs


def running(slurm):
    """{Slurm's job number: its nodes} of the jobs that run."""
    told = slurm.run(["squeue", "--noheader", "--states=RUNNING", "--format=%i %N"]).stdout
    return {job: numbers(nodes) for job, nodes in map(str.split, told.splitlines())}


def numbers(nodes):
    """The numbers of "node[0-2,7]" or "node5"."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", nodes)
    return [node for first, last in spans for node in range(int(first), int(last or first) + 1)]


def end(slurm, jobs):
    """End jobs; nothing starts before all of their nodes are free, or Slurm would decide from a part of them."""
    slurm.run(["scontrol", "update", "PartitionName=lab", "State=DOWN"])
    slurm.run(["scancel", *jobs], check=False)  # some have ended before
    still = ["squeue", "--noheader", "--states=RUNNING,COMPLETING", f"--jobs={','.join(jobs)}", "--format=%i"]
    wait_for(lambda: not slurm.run(still, check=False).stdout.split(), "the end of jobs", seconds=20)
    slurm.run(["scontrol", "update", "PartitionName=lab", "State=UP"])


def replay(slurm, jobs, outcome):
    """{number of a gang: the nodes that Slurm gives it}; asserts that Slurm starts what the simulation starts."""
    found = {}
    for moment in sorted({run.start for run in outcome.runs}):
        ended = [jobs[run.gang.number] for run in outcome.runs if run.end <= moment]
        if ended:
            end(slurm, ended)
        wanted = {jobs[run.gang.number] for run in outcome.runs if run.start <= moment < run.end}
        now = wait_for(
            lambda wanted=wanted: (found := running(slurm)).keys() == wanted and found,
            lambda wanted=wanted, at=moment: f"{sorted(wanted)} at {at}; Slurm runs {running(slurm)}",
            seconds=20,
        )
        found |= {number: now[job] for number, job in jobs.items() if job in now}
    return found


def leaves(nodes):
    return len(TOPOLOGY.leaves_of(nodes))


@pytest.mark.slow
def test_sixty_jobs_start_in_the_same_order_on_as_many_leaves_as_on_real_slurm(slurm):
    in_order_only(slurm)
    rng = random.Random(1)
    gangs = [Gang(n, 0, rng.choice((1, 1, 2, 2, 3, 4, 5, 6, 8)), rng.uniform(1, 100), HOUR) for n in range(60)]
    outcome = run_queue(TOPOLOGY, gangs, best_fit_by_leaf)
    theirs = replay(slurm, submit(slurm, gangs), outcome)
    assert len(theirs) == 60
    inventory, held, different = Inventory(TOPOLOGY), [], {}
    for run in outcome.runs:
        for one in [one for one in held if one.end <= run.start]:
            inventory.give(dict.fromkeys(theirs[one.gang.number], 1))
            held.remove(one)
        chosen = dict.fromkeys(theirs[run.gang.number], 1)
        ours = leaves(best_fit_by_leaf(inventory, run.gang.gpus))
        if ours != leaves(chosen):
            different[run.gang.number] = (ours, leaves(chosen))
        inventory.take(chosen)
        held.append(run)
    assert len(different) <= 0.05 * 60, f"leaves, ours and Slurm's: {different}"
    assert any(leaves(nodes) > 1 for nodes in theirs.values())  # or there was nothing to compare


@pytest.mark.slow
def test_backfill_around_a_reservation_is_slurms(slurm):
    """The head needs all nodes in two hours. A job of one hour may start before it, one of five hours may not."""
    limits = [(12, 2), (16, 1), (2, 5), (2, 1), (3, 1)]
    gangs = [Gang(n, n, nodes, 60, hours * HOUR) for n, (nodes, hours) in enumerate(limits)]
    outcome = run_queue(TOPOLOGY, gangs, best_fit_by_leaf, backfill=True)
    first = {run.gang.number for run in outcome.runs if run.start < 60}
    assert first == {0, 3}  # the last one has no room: 12 + 2 + 3 are more than 16
    jobs = submit(slurm, gangs)
    wait_for(
        lambda: running(slurm).keys() == {jobs[n] for n in first},
        lambda: f"{first}: {running(slurm)}",
        seconds=30,
    )
