"""Synthetic profiles: rows as Monitor writes them, of a run whose faults are known.

    rank 0   | data | own time           |--- messages ---|      a step ends on all ranks at once
    rank 1   | data | own time |~ waits ~|--- messages ---|      ~: for the slowest rank

    exposed_comm_ms    the waiting for the slowest rank, and the exposed part of the messages
    network_ms         the same with the hidden part

A diagnosis can be tested on them with any number of ranks, and without running one.
"""

import random
from dataclasses import dataclass

WARM_UP = 4  # steps in which memory grows to its usual size
WAVE = 4  # steps from one peak of memory to the next


@dataclass(frozen=True)
class SyntheticRun:
    """A run of `ranks` ranks; times in ms, memory in bytes. The defaults are a healthy run.

    own_ms: of a rank with `tokens` tokens. slow_rank needs `slower` times as long for a token.
    loaded_rank has `load` times the tokens; "any": another rank in each step. data_rank waits
    data_ms for its input; "all": each rank does.
    messages a step, each with latency_ms; transfer_ms: of all bytes. hidden: the part of the
    messages' time that is behind backward, 0 to 1. odd_steps: this many steps take `odd` times as
    long on odd_rank.
    leak: bytes that leak_rank gains in each step. wave: bytes that come and go on each rank.
    noise: relative, of each own time.
    """

    ranks: int = 2
    steps: int = 36
    own_ms: float = 40.0
    tokens: int = 4096
    slow_rank: int | None = None
    slower: float = 1.0
    loaded_rank: int | str | None = None
    load: float = 1.0
    data_rank: int | str = "all"
    data_ms: float = 0.2
    messages: int = 2
    latency_ms: float = 0.2
    transfer_ms: float = 2.0
    hidden: float = 0.0
    odd_steps: int = 0
    odd_rank: int = 0
    odd: float = 8.0
    held: float = 100e6
    leak_rank: int | None = None
    leak: float = 0.0
    wave: float = 0.0
    noise: float = 0.02
    seed: int = 0

    def rows(self):
        """Return a list of dicts, one per step and rank, with the columns of Monitor.

        Also: tokens (this rank's in this step), held_bytes (tensors that are alive).
        """
        chance = random.Random(self.seed)
        odd = set(chance.sample(range(WARM_UP, self.steps), self.odd_steps))
        return [row for step in range(self.steps) for row in self.of_step(step, odd, chance)]

    def of_step(self, step, odd, chance):
        """Return the rows of one step. odd: steps that take longer. chance: a random.Random."""
        loaded = chance.randrange(self.ranks) if self.loaded_rank == "any" else self.loaded_rank
        rows = []
        for rank in range(self.ranks):
            tokens = round(self.tokens * (self.load if rank == loaded else 1.0))
            own = self.own_ms * tokens / self.tokens
            own *= chance.uniform(1 - self.noise, 1 + self.noise)
            own *= self.slower if rank == self.slow_rank else 1.0
            own *= self.odd if step in odd and rank == self.odd_rank else 1.0
            data = self.data_ms if self.data_rank in (rank, "all") else 0.0
            row = {"step": step, "rank": rank, "tokens": tokens, "data_ms": data, "own": own}
            rows.append(row | {"held_bytes": self.held_bytes(step, rank)})
        network = self.messages * self.latency_ms + self.transfer_ms
        last = max(row["data_ms"] + row["own"] for row in rows)
        for row in rows:
            self.add_times(row, last, network)
        return rows

    def add_times(self, row, last, network):
        """Add the columns of time to a row. last: when the slowest rank is ready, in ms."""
        own = row.pop("own")
        waits = last - row["data_ms"] - own
        exposed = waits + network * (1 - self.hidden)
        first = self.latency_ms + 0.2 * self.transfer_ms / self.messages
        row["step_ms"] = last + network * (1 - self.hidden)
        row["forward_ms"] = 0.3 * own
        row["backward_ms"] = 0.6 * own + exposed
        row["optimizer_ms"] = 0.1 * own
        row["exposed_comm_ms"] = exposed
        row["messages"] = self.messages
        row["network_ms"] = network + waits
        row["shortest_message_ms"] = first if self.messages > 1 else network + waits

    def held_bytes(self, step, rank):
        """Return the bytes of a rank's tensors that are alive in a step."""
        held = self.held * min(1.0, 0.4 + 0.6 * step / WARM_UP)
        held += self.wave * (step % WAVE) / (WAVE - 1)
        return round(held + self.leak * step * (rank == self.leak_rank))
