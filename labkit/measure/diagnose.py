"""What holds a run up, by name: each rule looks for one cause in one table, a row a step and rank.

    rank 0   | data | forward | backward |////// waits //////|    exposed 40 ms
    rank 1   | data | forward | backward |////// waits //////|    exposed 40 ms
    rank 2   | data | forward            | backward          |    exposed  2 ms  <- the slow one
             ranks that average in every step take equally long: only their waiting tells them apart

A rule takes the table and returns a Finding or None: what it is, the numbers that show it, what to
change, and the time per step after that, as a part of the time before. `diagnose` calls them all.

The table: what Monitor writes (monitor.py), and where somebody has asked, how long a message takes
to each other rank (links.py), and how far each rank is (symptoms.last_collectives). A
rule reads only its columns; without one of them it says nothing.

Cost: no message; medians of a small table. Dean and Barroso, The Tail at Scale, CACM 2013 (what one
slow part does to all); PyTorch's Flight Recorder (who waits at which collective).
"""

from dataclasses import dataclass
from itertools import combinations
from math import ceil, nan

import pandas as pd

from labkit import progress
from labkit.measure.diagnosis_metrics import (
    FEWEST,
    by_rank,
    least,
    link_table,
    message_costs,
    own_ms,
    ranks,
    reads,
    step_ms,
    useful,
)

WORTH = 0.2  # a cause is named when it costs more than this part of a step; less may be noise
PERSISTENT = 0.75  # of the steps: so often is a slow rank the slowest; else the work moves
TWICE = 2.0  # so much longer than the others' does a message take on a slow link


@dataclass(frozen=True)
class Finding:
    """gain: time per useful step after the change / before; 0 for a hang, NaN if unknown."""

    name: str
    evidence: str
    change: str
    gain: float


@reads("step_ms", "data_ms")
def starved_input(rows):
    """Data is fetched while nothing is computed, when it could have been fetched before."""
    step, data = step_ms(rows), by_rank(rows, "data_ms")
    longest, rest = data.max(), step_ms(rows) - data.max()
    where = "each rank" if data.min() > longest / 2 else f"rank {data.idxmax()}"
    return Finding(
        "starved input",
        f"{where} waits {longest:.1f} of {step:.1f} ms for its data",
        f"fetch batches ahead, {ceil(longest / rest)} at a time (workers, prefetching)",
        rest / step,
    )


def diagnose(records, rules=None):
    """[Finding], what promises most first; [] of a healthy run. records: DataFrame or dicts."""
    rows = pd.DataFrame(records)
    if "step" in rows:  # steps that a resumed run takes again: the later counts
        rows = rows.drop_duplicates(["step", "rank"], keep="last")
    findings = [rule(rows) for rule in (RULES if rules is None else rules)]
    return sorted(filter(is_worth, findings), key=lambda found: found.gain)


def is_worth(finding):
    return finding is not None and not finding.gain > 1 - WORTH  # also where the gain is unknown


# ---- ranks


@reads("step_ms", "exposed_comm_ms")
def slow_rank(rows):
    """One rank computes longer than the others, in most of the steps; they wait for it."""
    own, step = own_ms(rows), step_ms(rows)
    if own.shape[1] < 2:
        return None
    middle = own.median()
    slowest = middle.idxmax()
    others = middle.drop(slowest).median()
    often = (own.idxmax(axis=1) == slowest).mean()
    lost = middle[slowest] - others
    if often < PERSISTENT:
        return None
    waited = by_rank(rows, "exposed_comm_ms")
    return Finding(
        "one slow rank",
        f"rank {slowest} computes {middle[slowest]:.1f} ms a step, the others {others:.1f}; it "
        f"waits least ({waited[slowest]:.1f} ms, they {waited.drop(slowest).median():.1f})",
        f"look at the machine of rank {slowest} (clock, heat, neighbours), or leave it out",
        (step - lost) / step,
    )


@reads("step_ms", "exposed_comm_ms")
def imbalance(rows):
    """In each step some rank has more work, and not always the same one; the others wait."""
    if is_worth(slow_rank(rows)):
        return None
    own, step = own_ms(rows), step_ms(rows)
    lost = own.max(axis=1) - own.mean(axis=1)
    even = rows.groupby("step")["step_ms"].max() - lost
    most = own.idxmax(axis=1).value_counts(normalize=True)
    return Finding(
        "imbalance",
        f"in a step the slowest rank computes {lost.median():.1f} ms more than the mean; "
        f"{len(most)} ranks take turns, none is it in more than {most.max():.0%} of the steps",
        "share the work of a step evenly: by length or cost, not by the number of samples",
        even.median() / step,
    )


# ---- messages


@reads("step_ms", "exposed_comm_ms")
def slow_link(rows):
    """Messages take much longer from one rank than from the others, or between two ranks."""
    times, step = link_table(rows), step_ms(rows)
    if times is None or len(times) < 3:  # with two ranks there is nothing to compare
        return None
    pairs = times.stack()
    usual, (sender, receiver) = pairs.median(), pairs.idxmax()
    part = 1 - usual / pairs.max()
    lost = min(least(rows, "exposed_comm_ms"), part * least(rows, "network_ms"))
    if pairs.max() <= TWICE * usual:
        return None
    every = times.loc[sender].min() > TWICE * usual
    where = f"from rank {sender} to {'any other' if every else f'rank {receiver}'}"
    return Finding(
        "one slow link",
        f"a message {where} takes {pairs.max():.1f} ms, the others' {usual:.1f}; the ranks stand "
        f"still for messages {least(rows, 'exposed_comm_ms'):.1f} of {step:.1f} ms",
        f"look at the link of rank {sender} (cable, port, speed), or move the rank",
        (step - lost) / step,
    )


MESSAGES = ("step_ms", "exposed_comm_ms", "network_ms", "messages", "shortest_message_ms")


@reads(*MESSAGES)
def tiny_buckets(rows):
    """Most of the network's time goes into there being a message at all; one would carry it all."""
    step = step_ms(rows)
    exposed, messages, latency, transfer = message_costs(rows)
    after = step - exposed + min(exposed, transfer + latency / messages)
    if messages < 2 or latency <= transfer:
        return None
    return Finding(
        "tiny buckets",
        f"{messages:.0f} messages a step of {latency / messages:.1f} ms each, however small: "
        f"{latency:.1f} of the {latency + transfer:.1f} ms that the network works",
        "put more gradients into a message (bucket_cap_mb)",
        after / step,
    )


@reads(*MESSAGES)
def communication_bound(rows):
    """The ranks stand still for bytes, and no single link explains it."""
    step = step_ms(rows)
    exposed, _, _, transfer = message_costs(rows)
    if is_worth(slow_link(rows)):
        return None
    return Finding(
        "communication-bound",
        f"all ranks stand still for messages {exposed:.1f} of {step:.1f} ms; bytes take "
        f"{transfer:.1f} ms of the network's time",
        "send half of the bytes (comm_hook), or compute more between messages (accumulation)",
        (step - min(exposed, transfer / 2)) / step,
    )


@reads("step_ms", "memory_stalls")
def memory_pressure(rows):
    """Memory that was given away must be fetched back: pages from the disk, blocks from the GPU."""
    steps = rows.groupby("step")[["step_ms", "memory_stalls"]].max()
    held_up = steps["memory_stalls"] > 0
    clean = steps.loc[~held_up, "step_ms"].median() if (~held_up).sum() >= FEWEST else nan
    mean = steps["step_ms"].mean()
    if held_up.mean() <= WORTH:
        return None
    worst = rows.groupby("rank")["memory_stalls"].sum().idxmax()
    return Finding(
        "memory pressure",
        f"in {held_up.mean():.0%} of the steps memory had to be fetched back, most of all on "
        f"rank {worst}: a step then takes {steps.loc[held_up, 'step_ms'].median():.1f} ms",
        "hold less: smaller micro-batches, recompute activations, shard the states",
        clean / mean,
    )


@reads("step_ms", "loss_scale")
def loss_scale_thrashing(rows):
    """The loss scale grows and overflows again and again; each overflow is a step for nothing."""
    change = rows.groupby("step")["loss_scale"].first().diff().dropna()
    fell, grew = (change < 0).sum(), (change > 0).sum()
    if not grew:  # at first it may fall until it fits
        return None
    return Finding(
        "loss-scale thrashing",
        f"the loss scale fell in {fell} of {len(change)} steps and grew in {grew}: each fall is a "
        "step that was skipped",
        "let the scale grow more seldom (growth_interval), or train in bf16",
        useful(rows),
    )


def hang(rows):
    """Ranks that have come to an operation wait for those that have not, or do another one."""
    if "scheduled" not in rows:
        return None
    seen = rows.dropna(subset="scheduled")
    told = {rank: of_rank.to_dict("records") for rank, of_rank in seen.groupby("rank")}
    members = {member for row in seen["ranks"] for member in row}
    told |= {rank: [] for rank in members - told.keys()}  # it has come to nothing yet
    late = progress.late(told)
    words = awaited(told) if late else apart(told)
    if not words:
        return None
    for rank in late[:1]:
        row = progress.latest(told[rank])
        last = f"last seen in {operation(row, row['scheduled'], told)}" if row else "not seen yet"
        words += f": waiting for {ranks(late)}, {last}"
    return Finding("a hang", words, "let every rank call the same collectives in the same order", 0)


def operation(row, number, told):
    """In words, the operation of that number; only of the latest it is known which it was."""
    name = f"collective {number:.0f}"
    if row["message"]:
        name = "message {:.0f} from rank {} to rank {}".format(number, *row["ranks"])
    elif len(row["ranks"]) < len(told):
        name += f" of {ranks(row['ranks'])}"
    known = number == row["scheduled"]
    return f"{name} ({row['op']} of {row['bytes']:,.0f} bytes)" if known else name


def awaited(told):
    """In words, who waits in which operations that another rank has not come to."""
    there = {}
    for wait in progress.waits(told):
        if wait.missing:
            call = operation(wait.row, wait.number, told)
            there.setdefault(call, []).append(wait.rank)
    return "; ".join(f"{ranks(who)} in {call}" for call, who in sorted(there.items()))


def apart(told):
    """In words, the first two ranks that are in different operations of the same number; ""."""
    for one, other in combinations(told, 2):
        if rows := progress.differ(told[one], told[other]):
            words = [operation(row, row["scheduled"], told) for row in rows]
            return f"rank {one} is in {words[0]}; rank {other} is in {words[1]}"
    return ""


RULES = (
    hang, starved_input, slow_rank, imbalance, slow_link, tiny_buckets, communication_bound,
    memory_pressure, loss_scale_thrashing,
)  # fmt: skip
