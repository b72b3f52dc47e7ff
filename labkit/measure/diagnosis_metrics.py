"""Metrics for the rules of diagnose.py: medians over the steps, one column per rank.

              step 1  step 2  step 3      a row a step and rank, as Monitor writes them
rank 0  own     31      30      32
rank 1  own     30      90      31        one odd step (a page fault) changes no median
        least   30      30      31        the last rank to arrive waits for no other rank
"""

from functools import wraps
from pathlib import Path

from labkit import progress

FEWEST = 5  # steps for a median


def reads(*columns):
    """Declare the columns of a rule: without one of them, or FEWEST steps, it returns None."""

    def decorate(rule):
        @wraps(rule)
        def guarded(rows):
            complete = set(columns) <= set(rows) and rows["step"].nunique() >= FEWEST
            return rule(rows) if complete else None

        return guarded

    return decorate


def step_ms(rows):
    """Return the median duration of a step in ms; the slowest rank determines each step's."""
    return rows.groupby("step")["step_ms"].max().median()


def by_rank(rows, column):
    """Return the median of a column for each rank."""
    return rows.groupby("rank")[column].median()


def least(rows, column):
    """Return the median over steps of the smallest value of a rank.

    For waiting times: the last rank to arrive waits for no other.
    """
    return rows.groupby("step")[column].min().median()


def own_ms(rows):
    """Return ms without waits for messages and data: a row per step, a column per rank."""
    own = rows["step_ms"] - rows["exposed_comm_ms"] - rows.get("data_ms", 0.0)
    return rows.assign(own=own).pivot(index="step", columns="rank", values="own")


def useful(rows):
    """Return the fraction of steps that were not skipped; a fall of the loss scale is a skip."""
    if "loss_scale" not in rows or rows["loss_scale"].isna().all():
        return 1.0
    return 1 - (rows.groupby("step")["loss_scale"].first().diff().dropna() < 0).mean()


def useful_step_ms(rows):
    """Return the median step in ms divided by the useful fraction: the time per useful step."""
    return step_ms(rows) / useful(rows)


def link_table(rows):
    """Return median ms of a message: a row per sender, a column per receiver; or None."""
    columns = {name: int(name[3:-3]) for name in rows if str(name).startswith("to_")}
    if not columns:
        return None
    return rows.groupby("rank")[list(columns)].median().rename(columns=columns)


def message_costs(rows):
    """Return (exposed ms, messages a step, their total latency in ms, their transfer in ms)."""
    exposed = least(rows, "exposed_comm_ms")
    network = least(rows, "network_ms")
    messages = rows["messages"].median()
    # a single message does not show which part of it is latency
    shortest = least(rows, "shortest_message_ms") if messages > 1 else 0.0
    latency = min(network, messages * shortest)
    return exposed, messages, latency, network - latency


# ---- a run that hangs


def last_collectives(folder):
    """Return how far each rank was in each group, from a run's folder.

    A list of dicts with "rank" and the fields of progress.Row, sorted by rank.
    """
    rows = []
    for path in Path(folder).glob("rank-*.box"):
        rank = int(path.stem.removeprefix("rank-"))
        rows += [{"rank": rank, **row} for row in progress.read(path)]
    return sorted(rows, key=lambda row: row["rank"])


def ranks(numbers):
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
