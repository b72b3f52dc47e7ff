"""What the rules of diagnose.py ask of a run's rows: medians over the steps, ranks side by side.

              step 1  step 2  step 3      a row a step and rank, as Monitor writes them
rank 0  own     31      30      32
rank 1  own     30      90      31        one odd step (a page, a neighbour) moves no median
        least   30      30      31        the last rank to come waits for no other rank
"""

from functools import wraps
from pathlib import Path

from labkit import progress

FEWEST = 5  # steps that make a median


def reads(*columns):
    """A rule says which columns it reads: where one is missing, or FEWEST steps, it is silent."""

    def decorate(rule):
        @wraps(rule)
        def asked(rows):
            there = set(columns) <= set(rows) and rows["step"].nunique() >= FEWEST
            return rule(rows) if there else None

        return asked

    return decorate


def step_ms(rows):
    """The median step, each as long as it was for the rank that took longest."""
    return rows.groupby("step")["step_ms"].max().median()


def by_rank(rows, column):
    return rows.groupby("rank")[column].median()


def least(rows, column):
    """The median over the steps of the smallest rank: the last to come waits for no other rank."""
    return rows.groupby("step")[column].min().median()


def own_ms(rows):
    """A row a step, a column a rank: ms in which it neither waited for messages nor for data."""
    own = rows["step_ms"] - rows["exposed_comm_ms"] - rows.get("data_ms", 0.0)
    return rows.assign(own=own).pivot(index="step", columns="rank", values="own")


def useful(rows):
    """The part of the steps that were not skipped: where the loss scale falls, one was."""
    if "loss_scale" not in rows or rows["loss_scale"].isna().all():
        return 1.0
    return 1 - (rows.groupby("step")["loss_scale"].first().diff().dropna() < 0).mean()


def useful_step_ms(rows):
    """The median step, and what it costs to take those again that were skipped."""
    return step_ms(rows) / useful(rows)


def link_table(rows):
    """Median ms of a message, a row a rank that sends, a column a rank that gets it; None."""
    columns = {name: int(name[3:-3]) for name in rows if str(name).startswith("to_")}
    if not columns:
        return None
    return rows.groupby("rank")[list(columns)].median().rename(columns=columns)


def message_costs(rows):
    """(exposed ms, messages of a step, ms of them all that bytes do not explain, ms that do)."""
    exposed, network = least(rows, "exposed_comm_ms"), least(rows, "network_ms")
    messages = rows["messages"].median()
    shortest = least(rows, "shortest_message_ms") if messages > 1 else 0.0  # one: nobody can tell
    latency = min(network, messages * shortest)
    return exposed, messages, latency, network - latency


# ---- a run that stands


def last_collectives(folder):
    """How far each rank was in each group, of a run's folder: progress.Row as dicts, and rank."""
    rows = []
    for path in Path(folder).glob("rank-*.box"):
        rank = int(path.stem.removeprefix("rank-"))
        rows += [{"rank": rank, **row} for row in progress.read(path)]
    return sorted(rows, key=lambda row: row["rank"])


def ranks(numbers):
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
