"""Interleaved variants: all ranks run the same one at the same time, and rank 0 reports. No time is tested."""

import pandas
import torch

from labkit import comm
from labkit.measure import interleaved_timing


class Context:
    """The part of a rank's context that is used."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.rows, self.bar = rank, world_size, [], []

    def record(self, **fields):
        self.rows.append(fields)

    def progress(self, step, total):
        self.bar.append(step / total)


def measure_two(rank, world_size):
    """The variants log their calls: every rank must call them in the same order, or collectives would hang."""
    context, calls = Context(rank, world_size), []
    variants = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b") or {"depth": 7}}
    barrier, interleaved_timing.dist.barrier = interleaved_timing.dist.barrier, lambda: (calls.append("|"), barrier())
    try:
        interleaved_timing.time_variants(context, variants, repetitions=6, steps=2)
    finally:
        interleaved_timing.dist.barrier = barrier
    return calls, context.rows, context.bar


def test_all_ranks_take_the_same_shuffled_turns(ranks):
    (calls, rows, bar), (other_calls, other_rows, _) = ranks(2, measure_two)
    assert calls == other_calls
    assert other_rows == []
    taken = ["".join(calls[i : i + 4]) for i in range(0, len(calls), 4)]
    assert set(taken) == {"|aa|", "|bb|"}  # the steps of a turn follow each other, between two barriers
    rounds = [tuple(taken[i : i + 2]) for i in range(0, len(taken), 2)]
    assert len(rounds) == 6 + interleaved_timing.WARMUP
    assert set(rounds) == {("|aa|", "|bb|"), ("|bb|", "|aa|")}
    assert [r["repetition"] for r in rows if r["variant"] == "a"] == list(range(6))
    assert all(r["ms"] > 0 for r in rows)
    assert all(r.get("depth") == (7 if r["variant"] == "b" else None) for r in rows)
    assert bar == sorted(bar) and bar[-1] == 1


def count_two(rank, world_size):
    context, tensor, calls = Context(rank, world_size), torch.ones(3), []

    def often():
        calls.append("often")
        for _ in range(1 if len(calls) > 1 else 5):  # the first step sends more than those after it
            comm.all_reduce(tensor)

    variants = {"often": often, "never": lambda: None, "knows": lambda: {"messages": 9}}
    interleaved_timing.time_and_count(context, variants, repetitions=2, steps=3, warmup=1)
    return len(calls), {row["variant"]: row["messages"] for row in context.rows}


def test_messages_are_those_of_a_second_step_that_is_not_timed(ranks):
    for rank, (calls, messages) in enumerate(ranks(2, count_two)):
        assert calls == 2 + 3 * (1 + 2), f"rank {rank}"
        assert messages == ({} if rank else {"often": 1, "never": 0, "knows": 9}), f"rank {rank}"


def test_one_process_needs_no_ranks():
    rows = list(interleaved_timing.timed({"a": dict, "b": lambda: None}, repetitions=3, steps=1, warmup=0))
    assert sorted((row["variant"], row["repetition"]) for row in rows) == [(v, r) for v in "ab" for r in range(3)]


def test_columns_are_in_the_order_of_the_repetitions():
    frame = pandas.DataFrame(
        {"variant": ["b", "a", "a", "b"], "repetition": [1, 0, 1, 0], "ms": [4.0, 1.0, 2.0, 3.0]},
    )
    assert interleaved_timing.columns(frame) == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
