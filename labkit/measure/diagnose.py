"""Diagnose a slow run: each rule looks for one cause in a table with a row per step and rank.

    rank 0   | data | forward | backward |////// waits //////|    exposed 40 ms
    rank 1   | data | forward | backward |////// waits //////|    exposed 40 ms
    rank 2   | data | forward            | backward          |    exposed  2 ms  <- the slow one
             ranks that average in every step take equally long: only their waiting times differ

A rule takes the table and returns a Finding or None: the cause, the evidence, what to change, and
the predicted time per step after that, relative to the time before. `diagnose` calls all rules.

The table: the rows of Monitor (monitor.py). Optional columns: how long a message takes to each
other rank (link_probe.py), and how far each rank is (diagnosis_metrics.last_collectives). A rule
returns None if one of its columns is missing.

Cost: no message; medians of a small table. Dean and Barroso, The Tail at Scale, CACM 2013 (the
effect of one slow part); PyTorch's Flight Recorder (which rank waits at which collective).
"""

from dataclasses import dataclass
from itertools import combinations
from math import ceil, isnan, nan

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

WORTH = 0.2  # a cause is named if it costs more than this part of a step; less may be noise
PERSISTENT = 0.75  # of the steps: how often a slow rank is the slowest; otherwise the load moves
TWICE = 2.0  # a link is slow if its messages take this many times as long as the others'


@dataclass(frozen=True)
class Finding:
    """One cause. gain: time per useful step after the change / before; 0: hang, NaN: unknown."""

    name: str
    evidence: str
    change: str
    gain: float


@reads("step_ms", "data_ms")
def starved_input(rows):
    """Detect data that is fetched while nothing is computed, and could be fetched earlier."""
    step = step_ms(rows)
    data = by_rank(rows, "data_ms")
    longest = data.max()
    rest = step - longest
    where = "each rank" if data.min() > longest / 2 else f"rank {data.idxmax()}"
    return Finding(
        "starved input",
        f"{where} waits {longest:.1f} of {step:.1f} ms for its data",
        f"fetch batches ahead, {ceil(longest / rest)} at a time (workers, prefetching)",
        rest / step,
    )


def diagnose(records, rules=None):
    """Return Findings, the largest speed-up first, unknown ones last; [] for a healthy run.

    records: the table above, as a DataFrame or a list of dicts. rules: default RULES.
    """
    rows = pd.DataFrame(records)
    if "step" in rows:  # a resumed run takes some steps again: the later row counts
        rows = rows.drop_duplicates(["step", "rank"], keep="last")
    findings = [rule(rows) for rule in (RULES if rules is None else rules)]
    return sorted(filter(is_worth, findings), key=gain_then_unknown)


def gain_then_unknown(finding):
    """Sort key: the smallest gain first, NaN last."""
    return isnan(finding.gain), finding.gain


def is_worth(finding):
    """Return whether a Finding costs more than WORTH of a step, or its cost is unknown."""
    return finding is not None and not finding.gain > 1 - WORTH  # True for NaN


# ---- ranks


@reads("step_ms", "exposed_comm_ms")
def slow_rank(rows):
    """Detect a rank that computes longer than the others in most steps, so that they wait."""
    own = own_ms(rows)
    step = step_ms(rows)
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
        f"check the machine of rank {slowest} (clock, heat, other jobs), or exclude it",
        (step - lost) / step,
    )


@reads("step_ms", "exposed_comm_ms")
def imbalance(rows):
    """Detect steps in which changing ranks have more work than the others, which wait."""
    if is_worth(slow_rank(rows)):
        return None
    own = own_ms(rows)
    step = step_ms(rows)
    lost = own.max(axis=1) - own.mean(axis=1)
    even = rows.groupby("step")["step_ms"].max() - lost
    most = own.idxmax(axis=1).value_counts(normalize=True)
    return Finding(
        "imbalance",
        f"in a step the slowest rank computes {lost.median():.1f} ms more than the mean; "
        f"the slowest rank changes: {len(most)} ranks, none in more than {most.max():.0%} of steps",
        "share the work of a step evenly: by length or cost, not by the number of samples",
        even.median() / step,
    )


# ---- messages


@reads("step_ms", "exposed_comm_ms")
def slow_link(rows):
    """Detect a link on which messages take much longer than on the others."""
    times = link_table(rows)
    step = step_ms(rows)
    if times is None or len(times) < 3:  # two ranks cannot be compared
        return None
    pairs = times.stack()
    usual = pairs.median()
    sender, receiver = pairs.idxmax()
    part = 1 - usual / pairs.max()
    lost = min(least(rows, "exposed_comm_ms"), part * least(rows, "network_ms"))
    if pairs.max() <= TWICE * usual:
        return None
    every = times.loc[sender].min() > TWICE * usual
    where = f"from rank {sender} to {'any other' if every else f'rank {receiver}'}"
    return Finding(
        "one slow link",
        f"a message {where} takes {pairs.max():.1f} ms, the others' {usual:.1f}; the ranks wait "
        f"for messages {least(rows, 'exposed_comm_ms'):.1f} of {step:.1f} ms",
        f"check the link of rank {sender} (cable, port, speed), or move the rank",
        (step - lost) / step,
    )


MESSAGES = ("step_ms", "exposed_comm_ms", "network_ms", "messages", "shortest_message_ms")


@reads(*MESSAGES)
def tiny_buckets(rows):
    """Detect messages so small that their latency takes most of the network's time."""
    step = step_ms(rows)
    exposed, messages, latency, transfer = message_costs(rows)
    after = step - exposed + min(exposed, transfer + latency / messages)
    if messages < 2 or latency <= transfer:
        return None
    return Finding(
        "tiny buckets",
        f"{messages:.0f} messages a step; latency takes {latency:.1f} of the "
        f"{latency + transfer:.1f} ms that the network works",
        "put more gradients into a message (bucket_cap_mb)",
        after / step,
    )


@reads(*MESSAGES)
def communication_bound(rows):
    """Detect ranks that wait for bytes although no single link is slow."""
    step = step_ms(rows)
    exposed, _, _, transfer = message_costs(rows)
    if is_worth(slow_link(rows)):
        return None
    return Finding(
        "communication-bound",
        f"all ranks wait for messages {exposed:.1f} of {step:.1f} ms; bytes take "
        f"{transfer:.1f} ms of the network's time",
        "send half of the bytes (comm_hook), or compute more between messages (accumulation)",
        (step - min(exposed, transfer / 2)) / step,
    )


@reads("step_ms", "memory_stalls")
def memory_pressure(rows):
    """Detect steps that wait for memory: pages read from disk, allocation retries on the GPU."""
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
        "use less memory: smaller micro-batches, recompute activations, shard the states",
        clean / mean,
    )


@reads("step_ms", "loss_scale")
def loss_scale_thrashing(rows):
    """Detect a loss scale that grows and overflows repeatedly; each overflow skips a step."""
    change = rows.groupby("step")["loss_scale"].first().diff().dropna()
    fell = (change < 0).sum()
    grew = (change > 0).sum()
    if not grew:  # at first the scale may only fall until it fits
        return None
    return Finding(
        "loss-scale thrashing",
        f"the loss scale fell in {fell} of {len(change)} steps and grew in {grew}: each fall "
        "skips a step",
        "let the scale grow less often (growth_interval), or train in bf16",
        useful(rows),
    )


def hang(rows):
    """Detect ranks that wait for others at an operation, or are in different operations."""
    if "scheduled" not in rows:
        return None
    seen = rows.dropna(subset="scheduled")
    by_rank_rows = {rank: of_rank.to_dict("records") for rank, of_rank in seen.groupby("rank")}
    members = {member for row in seen["ranks"] for member in row}
    by_rank_rows |= {rank: [] for rank in members - by_rank_rows.keys()}  # no operation yet
    late = progress.late(by_rank_rows)
    words = awaited(by_rank_rows) if late else apart(by_rank_rows)
    if not words:
        return None
    for rank in late[:1]:
        row = progress.latest(by_rank_rows[rank])
        last = "not seen yet"
        if row:
            last = f"last seen in {operation(row, row['scheduled'], by_rank_rows)}"
        words += f": waiting for {ranks(late)}, {last}"
    return Finding("a hang", words, "let every rank call the same collectives in the same order", 0)


def operation(row, number, rows):
    """Return the name of operation `number` of a row; only the latest one's op and bytes are known.

    rows: {rank: [progress.Row as dict]}.
    """
    name = f"collective {number:.0f}"
    if row["message"]:
        name = "message {:.0f} from rank {} to rank {}".format(number, *row["ranks"])
    elif len(row["ranks"]) < len(rows):
        name += f" of {ranks(row['ranks'])}"
    known = number == row["scheduled"]
    return f"{name} ({row['op']} of {row['bytes']:,.0f} bytes)" if known else name


def awaited(rows):
    """Return a sentence about ranks that wait in an operation that another rank has not reached."""
    waiting = {}
    for wait in progress.waits(rows):
        if wait.missing:
            call = operation(wait.row, wait.number, rows)
            waiting.setdefault(call, []).append(wait.rank)
    return "; ".join(f"{ranks(numbers)} in {call}" for call, numbers in sorted(waiting.items()))


def apart(rows):
    """Return a sentence about two ranks in different operations of the same number, or ""."""
    for first, second in combinations(rows, 2):
        if differing := progress.differ(rows[first], rows[second]):
            words = [operation(row, row["scheduled"], rows) for row in differing]
            return f"rank {first} is in {words[0]}; rank {second} is in {words[1]}"
    return ""


RULES = (
    hang, starved_input, slow_rank, imbalance, slow_link, tiny_buckets, communication_bound,
    memory_pressure, loss_scale_thrashing,
)  # fmt: skip
